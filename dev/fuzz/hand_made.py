"""The damaged files of tests/data_files/hostile, each in the folder of its format, in place of a valid one."""

from pathlib import Path

from dev.fuzz.formats import FORMATS
from dev.fuzz.subject import Subject, write

FOLDER = Path(__file__).parents[2] / "tests" / "data_files" / "hostile"
SECOND = ".bin"  # read with the first one of its name


def hand_made(folder: Path) -> Subject:
    """All of them; each is a case, and nothing is changed."""
    files = [write(folder / path.relative_to(FOLDER), path.read_bytes()) for path in sorted(FOLDER.rglob("*.*"))]
    subjects = {name: FORMATS[name](made(folder / "valid" / name)) for name in {path.parent.name for path in files}}

    def read(path: Path) -> None:
        subject, given = subjects[path.parent.name], [path, path.with_suffix(SECOND)]
        places = {each: place_of(subject, each) for each in given if each.is_file()}
        valid = {place: place.read_bytes() for place in places.values()}
        try:
            for each, place in places.items():
                place.write_bytes(each.read_bytes())
            subject.read(places[path])
        finally:
            for place, content in valid.items():
                place.write_bytes(content)

    return Subject([path for path in files if path.suffix != SECOND], read, damaged=True)


def made(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir(parents=True)
    return folder


def place_of(subject: Subject, path: Path) -> Path:
    """The first of a format's files with the ending of `path`, or the first."""
    return next((file for file in subject.files if file.suffix == path.suffix), subject.files[0])
