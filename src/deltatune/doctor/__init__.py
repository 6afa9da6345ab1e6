"""Examines a machine, and a model where one is given: does training compute the right numbers here?"""
