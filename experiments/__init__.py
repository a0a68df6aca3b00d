"""The papers' figures and tables, each one command.  Nothing imports this package."""
