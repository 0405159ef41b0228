"""The report of ``polyattn check``: run the checks, print a table, write a page."""
