"""Raw rows from wherever they lie. Nothing here knows what a question is; every row knows its own name for error messages."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from groupwise.config.load import load_config, recipes
from groupwise.data.named import NAMED, SUFFIXES, canonical_name, listing, local_copy
from groupwise.errors import DataError
from groupwise.importing import import_member, in_one_line

__all__ = ["Row", "Table", "is_local", "is_missing", "names_function", "peek_columns", "place_of", "read_table", "read_whole"]

KNOWN = ("arithmetic", *NAMED)
LONGEST_FIELD = 2**31 - 1
"""Characters of a CSV field: as many as the module takes on any system."""
SPLIT_NAMES = ("train", "validation", "valid", "dev", "test", "held_out", "eval")


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    """``train.jsonl line 17``: what an error message calls it."""
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Table:
    rows: tuple[Row, ...]
    label: str
    """Short name of the data set, the first part of its problems' ids."""
    split: str

    @property
    def columns(self) -> tuple[str, ...]:
        """Names in the order of first appearance, over all rows: JSON lines need not agree."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))


def is_local(source: str) -> bool:
    return canonical_name(source) is None and Path(source).expanduser().exists()


def is_missing(source: str) -> bool:
    """Whether it is the path of a file or folder that is not here. A name of the Hub is no path."""
    path = canonical_name(source) is None and _looks_like_path(source) and not names_function(source)
    return path and not Path(source).expanduser().exists()


def names_function(source: str) -> bool:
    """Whether it is the place of a Python function (``my_rows.py:rows``, ``package.module:rows``), not a split of a file or data set."""
    place, _, name = source.rpartition(":")
    a_module = "." in place and all(map(str.isidentifier, place.split("."))) and not place.endswith(SUFFIXES)
    a_module = a_module and not Path(place).is_dir()  # a folder of splits, such as data.v2
    return name.isidentifier() and (place.endswith(".py") or a_module)


def read_whole(source: str) -> str | None:
    """What ``source`` is where all its rows are read, whatever the split: a function, one file, or one Dataset of ``save_to_disk``."""
    if names_function(source):
        return "a function"
    if canonical_name(source) is not None:
        return None
    path = Path(source).expanduser()
    return "one file" if path.is_file() else "one saved Dataset" if (path / "state.json").is_file() else None


def place_of(source: str, split: str, folder: Path | None) -> Path | None:
    """The file or folder that is read for ``source``; None for the Hub. ``folder``: that of data sets known by name."""
    name = canonical_name(source)
    path = Path(source).expanduser() if name is None else local_copy(name, split, folder)
    return path if path is not None and path.exists() else None


def read_table(source: str, split: str, subset: str | None = None, folder: Path | None = None) -> Table:
    """All rows of one split. ``split`` does not matter where ``source`` is a single file, or a function.

    A name of ``named.NAMED`` is looked for in ``folder`` first, and then on the Hub.

    Raises DataError where the source does not exist, cannot be read, has no such split, or is empty.
    """
    if names_function(source):
        return Table(tuple(_function_rows(source)), source.rpartition(":")[2], split)
    name, path = canonical_name(source), place_of(source, split, folder)
    if path is None:
        table = _read_hub(source, split, subset)
    elif path.is_file():
        table = _file_table(path, split)
    else:
        table = _read_folder(path, split, subset or (NAMED[name].subset if name else None))
    if name is not None:  # problems keep their ids wherever the copy lies
        table = Table(table.rows, name, split)
    if not table.rows:
        raise DataError(f"data source {source!r} (split {split!r}) has no rows: check the file, or choose another data.split")
    return table


def peek_columns(source: str, split: str) -> tuple[str, ...]:
    """Column names of a local file or folder's first row, or ``()`` where that takes more than a glance. Never raises."""
    if not is_local(source):
        return ()
    try:
        path = Path(source).expanduser()
        file = path if path.is_file() else _split_files(path, split)[0]
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return tuple(pyarrow.parquet.read_schema(file).names)
        return tuple(next(_rows(file)).values)
    except (DataError, OSError, IndexError, StopIteration, ValueError):
        return ()


def _function_rows(source: str) -> list[Row]:
    function, _ = import_member(source, "data", DataError)
    try:
        table = function()
        made, narrow = list(table), _narrow_columns(table)
    except Exception as error:
        raise DataError(
            f"data source {source!r} failed: {in_one_line(error)}; it must return a list of rows, each a dict"
        ) from error
    if not made:
        raise DataError(f"data source {source!r} returned no rows")
    rows = [_row(f"row {number} of {source}", values) for number, values in enumerate(made)]
    return [Row(row.name, {**row.values, **_as_written(row.values, narrow)}) for row in rows] if narrow else rows


def _file_table(path: Path, split: str) -> Table:
    if path.stem.lower() in SPLIT_NAMES:  # gsm8k/train.jsonl is "gsm8k:train", not "train:train"
        return Table(tuple(_rows(path)), path.resolve().parent.name, path.stem)
    return Table(tuple(_rows(path)), path.stem, split)


def _rows(path: Path) -> Iterator[Row]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{str(path)!r} ends in {suffix or 'no suffix'!r}, which is not a data format: use one of {', '.join(SUFFIXES)}"
        )
    try:
        if suffix == ".parquet":
            yield from _parquet_rows(path)
        elif suffix == ".json":
            yield from _json_rows(path)
        elif suffix in (".csv", ".tsv"):
            yield from _csv_rows(path, "\t" if suffix == ".tsv" else ",")
        else:
            yield from _jsonl_rows(path)
    except UnicodeDecodeError:
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as error:  # the reader's counts from the beginning of its block
            line = content.count(b"\n", 0, error.start) + 1
            raise DataError(f"{str(path)!r} is not UTF-8 text (line {line}, byte {error.start}): save it as UTF-8") from error
        raise
    except OSError as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({error.strerror or error}): check the path and its permissions"
        ) from error


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                name = f"{path.name} line {number}"
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{name} is not JSON ({error}): each line must hold one object") from error
                yield _row(name, values)


def _row(name: str, values: object) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{name} holds a {type(values).__name__}, not an object with named columns: fix the file")
    return Row(name, values)


def _json_rows(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if "Extra data" in str(error):  # JSON lines under the name of JSON are common
            yield from _jsonl_rows(path)
            return
        raise DataError(f"{str(path)!r} is not JSON ({error}): it must hold a list of objects") from error
    if isinstance(content, dict):
        content = _rows_of_object(path, content)
    if not isinstance(content, list):
        raise DataError(f"{str(path)!r} holds a {type(content).__name__}: it must hold a list of objects")
    for number, values in enumerate(content, start=1):
        yield _row(f"{path.name} entry {number}", values)


def _rows_of_object(path: Path, content: dict[str, object]) -> object:
    """The one list of objects in a JSON object, the rows of columns, or the object as a row of its own.

    A conversation is no list of rows.
    """
    lists = {name: value for name, value in content.items() if isinstance(value, list)}
    of_objects = {
        name: value
        for name, value in lists.items()
        if value and isinstance(value[0], dict) and not {"role", "content"} <= value[0].keys()
    }
    if len(of_objects) > 1:
        raise DataError(
            f"{str(path)!r} holds several lists of objects ({', '.join(of_objects)}): write each to a file of its own, such as train.json"
        )
    if of_objects:
        return next(iter(of_objects.values()))
    if len(lists) == len(content) and len({len(value) for value in lists.values()}) == 1:
        return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return [content]


def _csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    # Of the whole process: worked solutions are longer than the module's 131,072 characters at times.
    csv.field_size_limit(LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)  # else an open quote swallows the rows that follow
        begin = 1
        try:
            names = list(reader.fieldnames or ())
            if twice := [name for name in names if names.count(name) > 1]:
                raise DataError(f"{path.name} has several columns {twice[0]!r}: rename all but one")
            begin = reader.line_num + 1
            for values in reader:
                begin = reader.line_num + 1
                if None in values or None in values.values():
                    raise DataError(
                        f"{path.name} line {reader.line_num} does not have the header's {len(names)} fields: "
                        "quote fields that hold the separator"
                        if names
                        else f"{path.name} line 1 is empty: it must name the columns"
                    )
                yield Row(f"{path.name} line {reader.line_num}", values)
        except csv.Error as error:
            raise DataError(
                f"{path.name} line {begin} is not CSV ({error}): a field that begins with a quote must end with one, and quotes within it "
                "are doubled; or write JSONL"
            ) from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        entries = table.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{str(path)!r} is not a Parquet file ({error}): download or write it again") from error
    narrow = _narrow(table.schema)
    for number, values in enumerate(entries, start=1):
        yield Row(f"{path.name} row {number}", {**values, **_as_written(values, narrow)})


def _narrow(schema: Any) -> list[Any]:
    """The fields that may hold, also in lists and records, numbers with a point of fewer than 64 bits: ``float`` and ``halffloat``."""
    return [field for field in schema if "float" in str(field.type)]


def _narrow_columns(table: Any) -> list[Any]:
    """Those of a Dataset, which knows their types; none of anything else."""
    return _narrow(getattr(getattr(table, "features", None), "arrow_schema", ()))


def _as_written(values: Mapping[str, Any], fields: Iterable[Any]) -> dict[str, Any]:
    """Of ``values`` those of ``fields``, with the shortest numbers that are the same in their types: 3.14, not 3.140000104904175, which
    no answer equals."""
    return {field.name: _shortest(values[field.name], field.type) for field in fields if field.name in values}


def _shortest(value: Any, kind: Any) -> Any:
    from pyarrow import types

    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_shortest(one, kind.value_type) for one in value]
    if isinstance(value, dict) and types.is_struct(kind):
        return {**value, **_as_written(value, kind)}
    narrow = value is not None and (types.is_float16(kind) or types.is_float32(kind))
    return float(str(kind.to_pandas_dtype()(value))) if narrow else value


def _read_folder(folder: Path, split: str, subset: str | None) -> Table:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return _read_saved(folder, split)
    root = folder / subset if subset and (folder / subset).is_dir() else folder
    files = _split_files(root, split)
    if not files:
        there = sorted(str(f.relative_to(root)) for f in _data_files(root))
        raise DataError(
            f"folder {str(folder)!r} has no file for split {split!r} (it has {', '.join(there) or 'no data files'}): "
            "set data.split, or give the file itself as data.source"
        )
    return Table(tuple(row for file in files for row in _rows(file)), folder.resolve().name, split)


def _data_files(folder: Path) -> list[Path]:
    return sorted(f for f in listing(folder) if f.suffix.lower() in SUFFIXES and os.path.isfile(f))


def _split_files(folder: Path, split: str) -> list[Path]:
    """``train.jsonl``, or shards such as ``data/train-00000-of-00002.parquet``; or the only data file that there is."""
    files = _data_files(folder)
    named = [f for f in files if f.stem == split or f.stem.startswith((f"{split}-", f"{split}_", f"{split}."))]
    named = [f for f in named if f.parent == folder] or named
    if len(places := sorted({f.parent.name for f in named})) > 1:
        raise DataError(
            f"folder {str(folder)!r} has split {split!r} in {' and in '.join(places)}, which are data sets of their own: set data.subset "
            "to one of them, or give the file itself as data.source"
        )
    exact = [f for f in named if f.stem == split]
    if not named and len(files) == 1 and split == "train" and files[0].stem not in SPLIT_NAMES:
        return files
    return exact[:1] or named


def _read_saved(folder: Path, split: str) -> Table:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"{str(folder)!r} cannot be loaded as a save_to_disk folder ({in_one_line(error)}): write it again"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{str(folder)!r} has no split {split!r}, only {', '.join(loaded)}: set data.split")
        loaded = loaded[split]
    return _dataset_table(loaded, folder.resolve().name, split)


def _read_hub(source: str, split: str, subset: str | None) -> Table:
    known = NAMED.get(canonical_name(source) or "")
    name, default_subset = (known.hub, known.subset) if known else (source, None)
    if known is None and _looks_like_path(source):
        raise DataError(f"data source {source!r} does not exist: check the path, or name a Hub data set such as openai/gsm8k")
    if known is None and "/" not in source and (meant := _nearest_name(source)):
        raise DataError(
            f"data source {source!r} is neither a file nor a data set known by name: did you mean {meant}? One of the Hub is written "
            "owner/name"
        )
    reachable = _hub_answers(source, name)
    import datasets

    try:
        with nullcontext() if reachable else _from_cache_alone(datasets):
            loaded = datasets.load_dataset(name, subset or default_subset, split=split)
    except Exception as error:
        raise DataError(
            f"data source {source!r} is no local file, and the Hub gives no data set {name!r} with split {split!r} "
            f"({in_one_line(error)}): check the name, data.subset, data.split and the network{_or_a_copy(known is not None)}"
        ) from error
    return _dataset_table(loaded, name.rpartition("/")[2], split)


def _nearest_name(source: str) -> str | None:
    """The data set that a misspelt name may mean; or the recipe, with the data that it names, since a recipe is none itself."""
    if near := get_close_matches(source.lower(), KNOWN, n=1, cutoff=0.75):
        return near[0]
    names = {recipe.name: recipe.path for recipe in recipes()}
    if near := get_close_matches(source.lower(), names, n=1, cutoff=0.75):
        return f"{load_config(names[near[0]]).data.source}, the data of the recipe {near[0]}"
    return None


HUB_TIMEOUT_S = 10.0


def _hub_answers(source: str, name: str) -> bool:
    """Whether the Hub can be reached, asked once; the client's own loading tries each file for half a minute where it cannot.

    Raises DataError where the Hub has no such data set, or does not give it to everybody.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
        return True
    except GatedRepoError as error:
        raise DataError(
            f"data set {name!r} is gated on the Hub: accept its terms on its page, and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"data source {source!r} is neither a file here nor a public data set on the Hub: check the spelling (known by name are "
            f"{', '.join(KNOWN)}), and log in with `hf auth login` if it is private"
        ) from error
    except Exception:  # no network, offline mode, a Hub in trouble: httpx's or requests' errors, by the client's release
        return False


@contextmanager
def _from_cache_alone(datasets: Any) -> Iterator[None]:
    """Read what was loaded before, without a network."""
    from huggingface_hub import constants

    places: list[Any] = [place for place in (constants, getattr(datasets, "config", None)) if hasattr(place, "HF_HUB_OFFLINE")]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _or_a_copy(known: bool) -> str:
    return ", or name a folder that has a copy in data.folder" if known else ""


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source or source.lower().endswith(SUFFIXES)


def _dataset_table(loaded: Any, label: str, split: str) -> Table:
    narrow = _narrow_columns(loaded)
    rows = (Row(f"row {number}", {**values, **_as_written(values, narrow)}) for number, values in enumerate(loaded, start=1))
    return Table(tuple(rows), label, split)
