"""`python -m rayapp.check FILE`: says what is wrong with a configuration file before anything is started.

`serve run` would say the same in the log of a server that goes on without an application; `make serve` asks here
first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from pydantic import ValidationError

from rayapp.config import AppConfig

IMPORT_PATH = "rayapp.app:build"


def problems(file: Path) -> list[str]:
    """What is wrong with the `args` of this project's applications in a Serve configuration file; empty if nothing."""
    try:
        config = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        return [f"{file}: {error}"]
    found = []
    applications = config.get("applications") if isinstance(config, dict) else None
    for application in applications or []:
        if application.get("import_path") == IMPORT_PATH:
            try:
                AppConfig.model_validate(application.get("args") or {})
            except ValidationError as error:
                for one in error.errors():
                    where = ".".join(map(str, ("args", *one["loc"])))
                    found.append(f"{file}: {where}: {one['msg']}")
    return found


def main() -> int:
    """Prints the problems of the file named on the command line; exit status 1 if there are any."""
    found = [problem for name in sys.argv[1:] for problem in problems(Path(name))]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
