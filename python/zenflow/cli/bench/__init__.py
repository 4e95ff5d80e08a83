"""The subcommand ``zenflow bench``; its parts that measure also serve the pytest suite in ``bench/``."""
