"""The command `dbo-greenlet`: one module per subcommand, `main` puts them together.

Nothing here imports torch, and what a subcommand needs is imported when it runs: help and `show` answer at once.
"""

from __future__ import annotations
