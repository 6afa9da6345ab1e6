"""`make demo` fine-tunes the bundled model on the bundled task, and shows its answers before and after."""

from .flow import run_demo
from .rewarded import run_rewarded_demo

__all__ = ["run_demo", "run_rewarded_demo"]
