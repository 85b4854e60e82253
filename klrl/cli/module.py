"""``python -m klrl.evaluate``, which is ``klrl evaluate``, and its kin (``klrl/base/moved.py``)."""

from functools import partial

from klrl.cli.wrapper import execute

assert __spec__ is not None
main = partial(execute, __spec__.name.split(".")[1])

if __name__ == "__main__":
    main()
