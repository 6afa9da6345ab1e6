"""Tests the versions of packages that a report, the doctor and the self-test name."""

from deltatune.machine import packages


def test_missing_package_is_left_out():
    assert list(packages.versions(["mlx", "no-such-package"])) == ["mlx"]


def test_both_libraries_of_models_count():
    assert {"mlx-lm", "mlx-vlm"} <= set(packages.PACKAGES)
