"""Finds the images and videos in the rows of a data set, opens them, and turns them into tokens and patches."""
