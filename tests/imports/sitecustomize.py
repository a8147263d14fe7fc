"""On the path of every python that the tests start: makes imports and mlx.launch cheaper, and changes nothing else.

Each `import transformers` reads its 3,000 files, twice, for the names that they export: a second of CPU time for each
rank and each probe of mlx-lm. The names follow from its version: the first import keeps them for all others.

mlx-lm's trainer imports wandb if it is there, for reports that are not asked of it here: another half a second.

mlx.launch waits until it can write to its ranks, which it always can: it keeps a core busy for as long as they run."""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

# Not typing's, whose import each python that starts would pay for.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

STRUCTURE, REPORTS = "transformers.utils.import_utils", "mlx_lm.tuner.callbacks"
LAUNCHER = "mlx._distributed_utils.launch"
PAUSE_S = 0.01
"""Of mlx.launch, unless a rank has printed something."""


class Finder:
    """Finds three modules, with loaders that go round what is slow in them."""

    @classmethod
    def find_spec(cls, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        loader = {STRUCTURE: StructureLoader, REPORTS: ReportsLoader, LAUNCHER: LauncherLoader}.get(name)
        if loader is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = loader(name, spec.loader.path)
        return spec


class StructureLoader(SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        from pathlib import Path

        super().exec_module(module)
        original, models = module.create_import_structure_from_path, Path(self.path).parents[1] / "models"

        def create_import_structure_from_path(path: str | Path) -> Any:
            # The first of the two names it by its folder, the other by its __init__.py.
            if Path(path) not in (models, models / "__init__.py"):
                return original(path)
            return kept(models, lambda: original(path))

        module.create_import_structure_from_path = create_import_structure_from_path


class LaterImported(ModuleType):
    """Stands for wandb, which is imported when something of it is used. It is not in sys.modules: whoever looks through
    them, as hypothesis does, would use it."""

    def __getattr__(self, name: str) -> Any:
        import wandb

        return getattr(wandb, name)


class ReportsLoader(SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        if "wandb" in sys.modules or PathFinder.find_spec("wandb") is None:
            super().exec_module(module)
            return
        sys.modules["wandb"] = LaterImported("wandb")
        try:
            super().exec_module(module)
        finally:
            del sys.modules["wandb"]


class LauncherLoader(SourceFileLoader):
    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        original = module.select

        def select(readable: list[int], writable: list[int], failed: list[int], limit_s: float) -> Any:
            if writable and limit_s:
                original(readable, [], [], PAUSE_S)
            return original(readable, writable, failed, limit_s)

        module.select = select


def kept(models: Path, find: Callable[[], Any]) -> Any:
    """What `find` returns for the folder, from a file after the first time."""
    import os
    import pickle
    from pathlib import Path

    # Beside this module's own compiled code. Nodes of the test cluster see it, too, read-only.
    folder = Path(__file__).with_name("__pycache__")
    file = folder / f"transformers-{models.stat().st_mtime_ns}.pickle"
    if file.exists():
        return pickle.loads(file.read_bytes())
    found = find()
    if os.access(folder, os.W_OK):
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(found))
        partial.replace(file)
    return found


sys.meta_path.insert(0, Finder)
# What its imports have made is most of what a process of a test has, and stays until its end.
gc.set_threshold(50_000)
