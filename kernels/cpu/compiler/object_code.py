"""Machine code of kernels: optimized by LLVM, kept in a folder of the user, loaded into this process.

A file of the cache holds a checksum and an object file. Its name holds a hash of all that the code depends on: sources,
compiler and processor. So all installations of the same sources share it. A file that cannot be read is made again. The
folder and its files must belong to this user, and nobody else may write there, or they are not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from plait.host.private_file import is_private, open_private
from plait.host.user_folders import kernel_folder
from plait.kernels.cpu import isa
from plait.kernels.cpu.compiler.compile_cache import SOURCE_HASH

CHECKSUM_BYTES = 32
MAX_UNUSED_S = 30 * 24 * 3600.0  # files that no start has read for so long are deleted
WRITING = threading.Lock()  # held while a file is written; a process that ends at once waits for it
MAX_WRITING_S = 600.0  # an unfinished file of that age belongs to a process that was killed while it wrote
_PART_SUFFIX = ".part"
_ENGINES: list[Any] = []  # own the machine code, which is never freed


def cache_folder() -> Path | None:
    """Returns the folder of compiled kernels, or None if there is none that this user alone can write."""
    folder = readable_folder()
    return folder if folder is not None and os.access(folder, os.W_OK) else None


def readable_folder() -> Path | None:
    """Returns the folder of compiled kernels even if it can only be read, as in an image; None if others may write."""
    try:
        folder = kernel_folder()
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except (OSError, RuntimeError):  # a read-only machine, or one without a home folder
        return None
    return folder if stat.S_ISDIR(status.st_mode) and is_private(status) else None


def cache_path(name: str, *depends_on: object) -> Path | None:
    """Returns the file for the code `name`, which depends on these values besides the kernels' sources."""
    folder = readable_folder()
    key = (SOURCE_HASH, llvmlite.__version__, llvm.llvm_version_info, *isa.compile_target(), *depends_on)
    return None if folder is None else folder / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.o"


def read(path: Path | None) -> bytes | None:
    """Returns the object file in a file of the cache; None if there is none, it is damaged, or another user's."""
    if path is None:
        return None
    try:
        with open(open_private(path), "rb") as file:
            content = file.read()
            with contextlib.suppress(OSError):  # a folder that can only be read
                os.utime(file.fileno())
    except OSError:
        return None
    code = content[CHECKSUM_BYTES:]
    return code if code and hashlib.sha256(code).digest() == content[:CHECKSUM_BYTES] else None


def write(path: Path | None, code: bytes) -> None:
    """Writes a file of the cache, completely or not at all, and deletes what has not been read for a month.

    Without a folder that can be written, or on a full disk, nothing is kept: the next process compiles again.
    """
    if path is None:
        return
    with WRITING, contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_part(path, hashlib.sha256(code).digest() + code)
        for old in path.parent.iterdir():
            max_age_s = MAX_WRITING_S if old.suffix == _PART_SUFFIX else MAX_UNUSED_S
            if old.suffix != ".lock" and time.time() - old.lstat().st_mtime > max_age_s:
                old.unlink()


def _write_part(path: Path, content: bytes) -> None:
    """Writes a file under another name and then renames it. Raises OSError, and leaves no file then."""
    part = path.with_suffix(f".{os.urandom(8).hex()}{_PART_SUFFIX}")
    try:
        with open(open_private(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
        part.replace(path)
    except OSError:  # a full disk, for example
        part.unlink(missing_ok=True)
        raise


def target_machine(level: int = 3) -> Any:
    """Returns LLVM's description of this processor. `level`: how much the generation of machine code optimizes."""
    cpu, features = isa.compile_target()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(
        cpu=cpu, features=features, opt=level, reloc="pic", codemodel="jitdefault", jit=True
    )


def optimized(module: Any, machine: Any) -> Any:
    """Returns a module of llvmlite, or its text, as LLVM's, optimized."""
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def simplified(module: Any, machine: Any) -> Any:
    """Returns a module of llvmlite as LLVM's, after a few passes that take a tenth of the time of `optimized`.

    For code that is generated as it shall run. It has no functions to inline, and most of the other time goes into
    analyses of its loops that change nothing.
    """
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_new_module_pass_manager()
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_new_gvn_pass()
    passes.add_simplify_cfg_pass()
    passes.run(parsed, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return parsed


def quick_code(module: str) -> bytes:
    """Returns the object file of a module's text, compiled in a fifth of the time of an optimized one.

    Variables become registers; no function is inlined. Nothing allows LLVM to reorder or contract float operations, so
    the results have the same bits as those of optimized code.
    """
    parsed = llvm.parse_assembly(module)
    parsed.verify()
    machine = target_machine(level=1)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.run(parsed, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0)))
    code: bytes = machine.emit_object(parsed)
    return code


def load(code: bytes, names: tuple[str, ...]) -> list[int]:
    """Loads an object file; returns the addresses of these functions."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    addresses = [engine.get_function_address(name) for name in names]
    assert all(addresses), f"{names}: a function is missing"
    return addresses
