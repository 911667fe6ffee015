"""`python -m dbo_greenlet.cli`, the same as the command `dbo-greenlet`."""

from __future__ import annotations

from .main import main

if __name__ == "__main__":
    main()
