"""One entrypoint a stage. Nothing imports them: the library is ``recipe``."""
