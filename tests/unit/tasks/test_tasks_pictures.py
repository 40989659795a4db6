"""Pictures in tasks: where they are named, what is refused, what tells tasks apart."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headway.config.sources import SftSource, TaskColumns, TaskSource
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tasks.demonstrations import read_demonstrations
from headway.tasks.sources import load_tasks, overlap
from headway.tokens.pictures import open_picture, template_messages


def png(color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), color).save(file, "PNG")
    return file.getvalue()


def written(folder: Path, *rows: dict[str, Any], name: str = "tasks.jsonl") -> TaskSource:
    folder.mkdir(exist_ok=True)
    (folder / "red.png").write_bytes(png())
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskSource(path=str(folder / name))


def asked(*parts: dict[str, Any], text: str = "which?") -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], "answer": "red"}


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def tasks_of(source: TaskSource) -> list[Task]:
    return load_tasks(source)


def test_paths_are_taken_from_the_file_that_names_them(tmp_path: Path) -> None:
    (task,) = tasks_of(written(tmp_path / "a", asked(part("red.png"))))
    assert task.prompt == "which?"
    ((address, content),) = task.pictures
    assert address == str(tmp_path / "a" / "red.png")
    picture, found = open_picture(address)
    assert picture.getpixel((0, 0)) == (255, 0, 0)
    assert found == content
    shown = {"type": "image", "content_hash": content}
    assert template_messages(task.messages) == [
        {"role": "user", "content": [shown, {"type": "text", "text": "which?"}]}
    ]
    (moved,) = tasks_of(written(tmp_path / "b", asked(part("red.png"))))
    assert moved.task_id == task.task_id
    assert moved.pictures != task.pictures


def test_a_column_of_pictures_stands_before_the_text(tmp_path: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png('blue')).decode()}"
    row = {"prompt": "which?", "images": ["red.png", url], "answer": "blue", "level": 2}
    (task,) = tasks_of(written(tmp_path, row))
    assert [address for address, _ in task.pictures] == [str(tmp_path / "red.png"), url]
    assert open_picture(url)[0].getpixel((3, 3)) == (0, 0, 255)
    assert task.metadata == {"level": 2}
    assert [one["type"] for one in task.messages[0]["content"]] == ["image_url", "image_url", "text"]
    (text,) = tasks_of(written(tmp_path, {"prompt": "which?", "images": [], "answer": "blue", "level": 2}))
    assert text.messages == ()
    assert text.task_id != task.task_id


def test_tasks_that_differ_in_their_pictures_are_others(tmp_path: Path) -> None:
    (tmp_path / "other.png").write_bytes(png("green"))
    first = tasks_of(written(tmp_path, asked(part("red.png"))))
    second = tasks_of(written(tmp_path, asked(part("other.png"))))
    assert first[0].task_id != second[0].task_id
    assert overlap({"train": first, "test": second}) == []
    assert [pair.prompts for pair in overlap({"train": first, "test": first + second})] == [1]


@pytest.mark.parametrize("column", [False, True])
def test_a_picture_is_its_bytes_whatever_it_is_called(tmp_path: Path, column: bool) -> None:
    def read(url: str) -> list[Task]:
        row = {"prompt": "which?", "images": [url], "answer": "red"} if column else asked(part(url))
        return tasks_of(written(tmp_path, row))

    first, inline = read("red.png"), f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    (tmp_path / "copy.png").write_bytes(png())
    for same in (read("copy.png"), read(inline)):
        assert same[0].task_id == first[0].task_id
        assert [pair.prompts for pair in overlap({"train": first, "test": same})] == [1]
    (tmp_path / "copy.png").write_bytes(png("blue"))
    changed = read("copy.png")
    assert changed[0].task_id != first[0].task_id
    assert overlap({"train": first, "test": changed}) == []


def test_the_column_of_pictures_has_another_name_or_none(tmp_path: Path) -> None:
    def read(row: dict[str, Any], images: str) -> Task:
        source = written(tmp_path, {"prompt": "which?", "answer": "red", **row})
        (task,) = tasks_of(source.model_copy(update={"columns": TaskColumns(images=images)}))
        return task

    named = read({"pictures": ["red.png"], "images": 2}, "pictures")
    assert len(named.pictures) == 1
    assert named.metadata == {"images": 2}
    off = read({"images": 2}, "")
    assert off.messages == ()
    assert off.metadata == {"images": 2}
    with pytest.raises(ConfigurationError, match='missing "pictures"'):
        read({"images": ["red.png"]}, "pictures")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (part("blue.png"), "no such picture: "),
        (part("broken.png"), "broken.png can't be read as a picture"),
        (part("drawing.eps"), "drawing.eps can't be read as a picture"),
        (part("cut.png"), "cut.png can't be read as a picture"),
        (part("data:image/png;base64,%%%"), "can't be read as a picture: a data: URL needs base64"),
        (part("data:image/png,abc"), "a data: URL needs base64"),
        (part("https://somewhere/red.png"), "nothing is fetched"),
        (part(None), "valid: a path, or a data: URL of base64"),
        ({"type": "input_audio"}, "type = 'input_audio': valid: text"),
        ({"type": "video_url"}, "type = 'video_url': valid: text"),
        ({"type": "table"}, "type = 'table': valid: text with its text, image_url with its url"),
    ],
)
def test_what_is_no_picture_is_refused_where_it_stands(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "cut.png").write_bytes(png()[:40])
    (tmp_path / "drawing.eps").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    )
    with pytest.raises(ConfigurationError, match=r'tasks.jsonl:1: "prompt"\[0\].content\[0\]') as caught:
        tasks_of(written(tmp_path, asked(given)))
    assert message in str(caught.value)


def test_images_of_another_form_are_refused(tmp_path: Path) -> None:
    for images in ({"bytes": "x"}, [3]):
        with pytest.raises(ConfigurationError, match=r'tasks.jsonl:1: "images"'):
            tasks_of(written(tmp_path, {"prompt": "which?", "images": images}))
    with pytest.raises(ConfigurationError, match=r'columns[.]images = "" takes none'):
        tasks_of(written(tmp_path, {"prompt": "which?", "images": 2}))
    with pytest.raises(ConfigurationError, match='"images" beside messages'):
        tasks_of(written(tmp_path, asked(part("red.png")) | {"images": ["red.png"]}))


def test_demonstrations_have_no_pictures(tmp_path: Path) -> None:
    talk = [*asked(part("red.png"))["prompt"], {"role": "assistant", "content": "red"}]
    source = written(tmp_path, {"messages": talk})
    with pytest.raises(ConfigurationError, match="pictures: headway sft learns from text alone"):
        list(read_demonstrations(SftSource(path=source.path)))
