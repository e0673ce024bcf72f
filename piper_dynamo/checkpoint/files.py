"""The files of a checkpoint: one of torch.distributed.checkpoint (DCP), replaced as a whole.

    <save>_<rank>.distcp   what a rank wrote: values one after another, each as torch.save writes it
    .metadata              which values there are, of what shape, and where each block of them lies

A save writes files of new names, then puts its `.metadata` in the old one's place by a rename, and
only then removes the old files: whoever is killed at any moment leaves the last whole checkpoint.

Nothing is unpickled freely: `.metadata` may name DCP's own records alone, and values are loaded by
torch's weights-only loader. Each block has a checksum, kept in the metadata's `planner_data`.
"""

import io
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperError, PiperRuntimeError, format_error, join_faults
from piper_dynamo.files import private

METADATA = ".metadata"
SUFFIX = ".distcp"
OURS, FORMAT = "piper", 1  # key and number of what is ours in the metadata
MODEL, STATE = "model", "optim.state"

# What a `.metadata` may name, by module; of `torch` also its dtypes.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath"),  # where torch's own writer says that it wrote
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


def model_key(name: str) -> str:
    """Where a parameter or buffer of the user's name is kept."""
    return f"{MODEL}.{name}"


def state_key(name: str, entry: str) -> str:
    """Where an entry of a parameter's optimizer state is kept."""
    return f"{STATE}.{name}.{entry}"


def _path(key: str) -> tuple[str, ...]:
    """Where torch's converters put a value in the nested dict that they make."""
    if key.startswith(f"{STATE}."):
        name, _, entry = key.removeprefix(f"{STATE}.").rpartition(".")
        return "optim", "state", name, entry
    head, _, rest = key.partition(".")
    return (head, rest) if rest else (key,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A block of a value, as a rank has written it.

    Attributes:
        index: Of what, and from which row.
        file: The file's name.
        start: Where in it, in bytes.
        num_bytes: How many.
        check: Their CRC-32.
    """

    index: MetadataIndex
    file: str
    start: int
    num_bytes: int
    check: int


class _Checked:
    """A file to write to that sums what it is given."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.check = 0

    def write(self, data: Any) -> int:
        self.check = zlib.crc32(data, self.check)
        return self._file.write(data)  # type: ignore[no-any-return]

    def flush(self) -> None:
        self._file.flush()


def write(path: Path, items: Iterable[tuple[WriteItem, Any]]) -> list[Written]:
    """Write a rank's file and see it on the disk.

    Args:
        path: The file.
        items: What DCP calls each, and its tensor or bytes.
    """
    found = []
    with open(path, "wb", opener=private) as file:
        for item, value in items:
            start = file.tell()
            sink: Any = _Checked(file)  # torch.save asks for nothing but `write`
            if isinstance(value, Tensor):
                torch.save(_alone(value), sink)
            else:
                sink.write(value.getbuffer())
            size = file.tell() - start
            found.append(
                Written(
                    index=item.index, file=path.name, start=start, num_bytes=size, check=sink.check
                )
            )
        file.flush()
        os.fsync(file.fileno())
    return found


def _alone(value: Tensor) -> Tensor:
    """The value in memory of its own: torch.save writes all that a view is a view of."""
    value = value.detach().cpu().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def commit(
    folder: Path,
    save: str,
    metadata: Metadata,
    parts: Sequence[Sequence[Written]],
    ties: Mapping[str, str],
) -> None:
    """Make what all ranks wrote the folder's checkpoint; rank 0 does it.

    Args:
        folder: Where.
        save: The name that this save's files begin with.
        metadata: DCP's, without places.
        parts: What each rank wrote.
        ties: Further names of parameters, and the name that each is written under.

    Raises:
        PiperRuntimeError: A rank's file is not here as it was written.
    """
    written = [one for part in parts for one in part]
    _check_files(folder, written)
    places = {w.index: compat.storage_info(w.file, w.start, w.num_bytes) for w in written}
    checks = {(w.index.fqn, _offset(w.index)): w.check for w in written}
    _add_ties(metadata, places, checks, ties)
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta(checkpoint_id=str(folder), save_id=save)
    metadata.planner_data = {key: _path(key) for key in metadata.state_dict_metadata}
    metadata.planner_data[OURS] = {"format": FORMAT, "checks": checks}
    temporary = folder / f"{METADATA}.{save}"
    with open(temporary, "wb", opener=private) as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / METADATA)
    _sync(folder)
    _clear(folder, save)


def _offset(index: MetadataIndex) -> tuple[int, ...] | None:
    return tuple(index.offset) if index.offset is not None else None


def _check_files(folder: Path, written: Sequence[Written]) -> None:
    sizes: dict[str, int] = {}
    for one in written:
        sizes[one.file] = max(sizes.get(one.file, 0), one.start + one.num_bytes)
    faults = []
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            faults.append(f"{name}: written {size} bytes, here {found}")
    if faults:
        raise PiperRuntimeError(
            join_faults(
                f"rank 0 does not see in {folder} what other ranks wrote",
                faults,
                hint="save to a folder on a file system that all ranks share",
            )
        )


def _add_ties(
    metadata: Metadata, places: dict[Any, Any], checks: dict[Any, int], ties: Mapping[str, str]
) -> None:
    """Let tied parameters be found by each of their names, on the same bytes."""
    entries: dict[str, list[MetadataIndex]] = {}
    for index in places:
        entries.setdefault(index.fqn, []).append(index)
    for other, name in ties.items():
        pairs = {model_key(name): model_key(other)}
        start = state_key(name, "")
        for key in metadata.state_dict_metadata:
            if key.startswith(start) and "." not in key.removeprefix(start):
                pairs[key] = state_key(other, key.removeprefix(start))
        for key, also in pairs.items():
            metadata.state_dict_metadata[also] = metadata.state_dict_metadata[key]
            for index in entries[key]:
                places[MetadataIndex(also, index.offset, index.index)] = places[index]
                checks[also, _offset(index)] = checks[key, _offset(index)]


def _sync(folder: Path) -> None:
    """See a rename on the disk, where folders can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _clear(folder: Path, save: str) -> None:
    """Remove the files of earlier saves, whole and broken ones."""
    for path in [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"{METADATA}.*")]:
        if not path.name.startswith(save):
            path.unlink(missing_ok=True)


# Reading


class _MetadataUnpickler(pickle.Unpickler):
    """Makes DCP's records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _METADATA_CLASSES.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class Checkpoint(FileSystemReader):
    """A whole checkpoint in a folder; reading it runs nothing of what it holds.

    Attributes:
        folder: Where.
        metadata: DCP's.
    """

    def __init__(self, folder: Path) -> None:
        """Read the metadata.

        Raises:
            PiperError: There is no checkpoint, it is damaged, or another program's.
        """
        super().__init__(str(folder))
        self.folder = folder
        self.metadata = self.read_metadata()
        self.set_up_storage_reader(self.metadata, is_coordinator=True)
        found = self.metadata.planner_data
        ours = found.get(OURS) if isinstance(found, dict) else None
        if ours is None or ours["format"] != FORMAT:
            has = f"format {ours['format']}" if ours is not None else "no mark of its own"
            raise PiperError(
                format_error(
                    f"{folder} holds a checkpoint that piper.save_checkpoint did not write",
                    {"found": has, "expected": f"format {FORMAT}"},
                    hint="make a plain file of it (torch.distributed.checkpoint.format_utils."
                    "dcp_to_torch_save) and give its model to piper.load_state_dict",
                )
            )
        self._checks: dict[Any, int] = ours["checks"]

    @property
    def save(self) -> str:
        """The name of the save that wrote it."""
        meta = self.metadata.storage_meta
        return str(meta.save_id) if meta is not None else ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata, made of its own records only.

        Raises:
            PiperError: There is none, or it cannot be read.
        """
        try:
            with (self.folder / METADATA).open("rb") as file:
                found = _MetadataUnpickler(file).load()
        except FileNotFoundError as error:
            raise _no_checkpoint(self.folder) from error
        except Exception as error:  # a damaged pickle can fail in any way
            raise _damaged(self.folder, f"{METADATA}: {error}") from error
        if not isinstance(found, Metadata):
            raise _damaged(self.folder, f"{METADATA} holds a {type(found).__name__}")
        return found

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors whose keys begin with `prefix.`, by the rest of the key."""
        return {
            key.removeprefix(f"{prefix}."): tuple(entry.size)
            for key, entry in self.metadata.state_dict_metadata.items()
            if key.startswith(f"{prefix}.") and hasattr(entry, "size")
        }

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of a tensor."""
        entry: Any = self.metadata.state_dict_metadata[key]
        return entry.properties.dtype  # type: ignore[no-any-return]

    def places(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Where each value's blocks lie; equal for tied parameters."""
        found: dict[str, list[tuple[str, int]]] = {}
        for index, place in self.storage_data.items():
            found.setdefault(index.fqn, []).append((place.relative_path, place.offset))
        return {key: tuple(places) for key, places in found.items()}

    def object(self, key: str) -> Any:
        """A value that is no tensor.

        Raises:
            PiperError: It is damaged, or names what the weights-only loader does not make.
        """
        data = self._bytes(MetadataIndex(key))
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of the unpickler, or of a damaged archive
            raise _damaged(self.folder, f"{key}: {error}") from error

    def refuse_objects(self, items: Iterable[ReadItem]) -> None:
        """What is read into tensors must be tensors: torch's reader unpickles objects freely.

        Raises:
            PiperError: One is an object.
        """
        for item in items:
            if item.type is not LoadItemType.TENSOR:
                raise _damaged(self.folder, f"{item.dest_index.fqn} is no tensor in it")

    def verify(self, indices: Iterable[MetadataIndex]) -> None:
        """Read these blocks and compare their checksums.

        Raises:
            PiperError: One is damaged or missing.
        """
        for index in dict.fromkeys(indices):
            self._bytes(index)

    def _bytes(self, index: MetadataIndex) -> bytes:
        place = self.storage_data.get(index)
        if place is None or Path(place.relative_path).name != place.relative_path:
            raise _damaged(self.folder, f"{index.fqn} lies nowhere in this folder")
        try:
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data: bytes = file.read(place.length)
        except FileNotFoundError as error:
            raise _damaged(self.folder, f"{place.relative_path} is missing") from error
        want = self._checks.get((index.fqn, _offset(index)))
        if len(data) != place.length or zlib.crc32(data) != want:
            raise _damaged(
                self.folder, f"{index.fqn} in {place.relative_path} is not what was written"
            )
        return data


def _no_checkpoint(folder: Path) -> PiperError:
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    inner = [name for name in found if (folder / name / METADATA).exists()]
    here = ", ".join(found[:6]) or ("nothing" if folder.is_dir() else "no such folder")
    hint = "name the folder that piper.save_checkpoint was given"
    if inner:
        hint = f"it has checkpoints in {', '.join(inner)}: name one of them"
    elif any(name.endswith(SUFFIX) for name in found):
        hint = "a first save was broken off here: there is no earlier checkpoint to go back to"
    return PiperError(
        format_error(f"there is no checkpoint in {folder}", {"found": here}, hint=hint)
    )


def _damaged(folder: Path, why: str) -> PiperError:
    return PiperError(
        format_error(
            f"the checkpoint in {folder} is damaged; nothing was loaded",
            {"why": why},
            hint="use an earlier one",
        )
    )


def packed(value: Any, what: str) -> Any:
    """The value, which must be such that the weights-only loader makes it again.

    Raises:
        PiperError: It is not; names the entry.
    """
    entries = value.items() if isinstance(value, dict) else [("", value)]
    for key, one in entries:
        data = io.BytesIO()
        try:
            torch.save(one, data)
            data.seek(0)
            torch.load(data, weights_only=True)
        except Exception as error:  # whatever its own pickling raises
            where = f"{what}[{key!r}]" if isinstance(value, dict) else what
            raise PiperError(
                format_error(
                    f"{where} cannot be saved: a checkpoint holds no objects of arbitrary classes",
                    {"value": f"a {type(one).__name__}", "why": str(error).split("\n", 1)[0]},
                    hint="save numbers, text, tensors, and lists and dicts of them: an object's "
                    "state_dict() rather than the object",
                )
            ) from error
    return value
