"""--config: a flat YAML file whose keys are the flags' names, with dashes or underscores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.options import ALIASES, all_options, closest
from engine.errors import ConfigError

if TYPE_CHECKING:
    import yaml


def read_config_file(path: str) -> dict[str, tuple[str, object]]:
    """Option name -> (where it stands, value). Raises ConfigError naming file and key."""
    import yaml  # here, so that programs without --config do not pay for it

    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The configuration file {path} is not valid YAML: {_reason(error)}.") from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode) or not isinstance(data, dict):
        raise ConfigError(f"The configuration file {path} must hold `name: value` lines.")
    options = all_options()
    values: dict[str, tuple[str, object]] = {}
    # The composed keys, because loading keeps only the last of two equal ones.
    for key_node, _ in node.value:
        key = str(key_node.value)
        name = key.replace("-", "_")
        name = ALIASES.get(name, name)
        if name not in options:
            known = [option.replace("_", "-") for option in (*options, *ALIASES)]
            raise ConfigError(f"{path}: unknown key {key[:100]!r}{closest(key.replace('_', '-'), known)}", param=key)
        if name in values:
            raise ConfigError(f"{path}: {name} is given twice.", param=name)
        values[name] = (f"{path}: {key}", data[key])
    return values


def _reason(error: yaml.YAMLError) -> str:
    """What is wrong and where; without the line itself, which may hold the key."""
    problem = " ".join(str(getattr(error, "problem", None) or type(error).__name__).split())
    mark = getattr(error, "problem_mark", None)
    return problem if mark is None else f"{problem}, line {mark.line + 1}, column {mark.column + 1}"
