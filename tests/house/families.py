"""No family of models is named outside its own folder: what every family is told of goes by the contract.

Presets name families, and their own names contain them; what is built for one model alone belongs into its folder. A
benchmark may have a family's name on the command line, which only the table of benchmarks spells out. Scopes of CUDA
graphs have the names that Megatron-LM gives them, for any family's layers of experts; tables of tiny configurations
have the fields and model types of Hugging Face's. That one's short name also stands for its commands and formats, and
its catalogue of models is for the interface to prove. The other side of a benchmark is transformers' own class, by its
name.
"""

from __future__ import annotations

import re

from tests.house.source import Module, Tree

BENCHMARK_NAME = re.compile(r'^    [A-Z_]+ = "[a-z-]+"$')
"""A member of the enumeration of benchmarks, in the file below."""
SCOPE = re.compile(r'"moe"|moe_router(, moe)?|moe_preprocess|the scope moe')
"""A scope of CUDA graphs, as a value or in words."""
THEIR_WORDS = re.compile(r"\bhf (download|auth)\b|\bhf_[a-z]\w+|\"moe_tp_experts\"")
"""Hugging Face's command, what is read from or written in its formats, and a name of its plans."""
CATALOGUE = re.compile(r"^from meshwright\.models\.hf\.")
"""An import of Hugging Face's catalogue of models, by the interface below."""
INTERFACE = "api.py"
COMMON = "module"
"""A family whose name is a word that every file may use: it's named where its files are imported."""
THEIR_FIELDS = "models/hf/tiny_"
"""Start of the paths of those tables, and of what reads them."""
OTHER_SIDE = "meshwright_bench/gpu/trainer_loop.py"
"""The loop of transformers that a benchmark compares with."""
BENCHMARKS = "meshwright_bench/benchmarks.py"


def family_breaches(tree: Tree) -> list[str]:
    """Files outside a family's folder that name it, presets' names aside."""
    families = sorted({module.inner_path.split("/")[1] for module in tree.package if _is_family(module)})
    if not families:
        return []
    # As a word, or as the start of a class's name: `DiTBlock`.
    named = [name for name in families if name != COMMON]
    names = re.compile("|".join([*(rf"\b(?i:{name})(?=\b|[A-Z0-9_])" for name in named), rf"models\.({COMMON})\b"]))
    presets = sorted((path.stem for path in tree.root.glob("src/meshwright/config/presets/*.toml")), key=len)
    breaches = []
    for module in tree.package:
        if module.inner_path.startswith((THEIR_FIELDS, OTHER_SIDE)):
            continue
        for number, line in enumerate(module.text.splitlines(), start=1):
            if module.inner_path == BENCHMARKS:
                line = BENCHMARK_NAME.sub("", line)
            if module.inner_path == INTERFACE:
                line = CATALOGUE.sub("", line)
            line = THEIR_WORDS.sub("", SCOPE.sub("", line))
            for preset in reversed(presets):
                line = line.replace(preset, "")
            for found in names.finditer(line):
                if not module.inner_path.startswith(f"models/{(found[1] or found[0]).lower()}/"):
                    breaches.append(f"{module.path}:{number} names the family {found[0]}")
    return breaches


def _is_family(module: Module) -> bool:
    parts = module.inner_path.split("/")
    return len(parts) == 3 and parts[0] == "models" and parts[2] == "family.py" and parts[1] != "contract"
