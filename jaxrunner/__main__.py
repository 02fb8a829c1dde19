"""`python -m jaxrunner`: the command line."""

from jaxrunner.cli import app

if __name__ == "__main__":
    app(prog_name="jaxrunner")
