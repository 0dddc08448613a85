"""Code to HTML with spans for comments, strings, keywords and so on; every character stays."""
import html
import re

CPP_WORDS = """alignas alignof auto bool break case catch char class concept const const_cast
consteval constexpr constinit continue co_await co_return co_yield decltype default delete do double
dynamic_cast else enum explicit extern false final float for friend if inline int int32_t int64_t
long mutable namespace new noexcept nullptr operator override private protected public
reinterpret_cast requires return short signed size_t sizeof static static_assert static_cast struct
switch template this thread_local throw true try typedef typename uint32_t uint64_t uint8_t union
unsigned using virtual void volatile while""".split()
PYTHON_WORDS = """False None True and as assert break class continue def del elif else except
finally for from global if import in is lambda nonlocal not or pass raise return try while with
yield""".split()


def _language(*kinds):
    return re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in kinds), re.M | re.S)


def _words(words):
    return r"\b(?:%s)\b" % "|".join(words)


NUMBER = r"\b0x[\da-fA-F']+\b|\b\d[\d']*(?:\.\d+)?(?:[eE][+-]?\d+)?[uUlLfF]*\b"
STRING = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
LANGUAGES = {
    "cpp": _language(("c", r"//[^\n]*|/\*.*?\*/"), ("p", r"^[ \t]*#[ \t]*\w+"),
                     ("s", r'R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])\''),
                     ("k", _words(CPP_WORDS)), ("n", NUMBER),
                     ("t", r"\b[A-Z][A-Za-z]*[a-z]\w*\b")),
    "python": _language(("c", r"#[^\n]*"), ("s", r'""".*?"""|' + STRING),
                        ("k", _words(PYTHON_WORDS)), ("n", NUMBER)),
    "sh": _language(("c", r"(?:(?<=\s)|^)#[^\n]*"), ("s", STRING),
                    ("o", r"(?<=\s)--?[a-zA-Z][\w-]*")),
    "json": _language(("t", r'"(?:\\.|[^"\\])*"(?=\s*:)'), ("s", r'"(?:\\.|[^"\\])*"'),
                      ("k", r"\b(?:true|false|null)\b"), ("n", r"-?" + NUMBER)),
    "diff": _language(("add", r"^\+[^\n]*"), ("del", r"^-[^\n]*"), ("p", r"^@@[^\n]*")),
}
BY_SUFFIX = {".h": "cpp", ".cpp": "cpp", ".cuh": "cpp", ".cu": "cpp", ".py": "python",
             ".json": "json", ".patch": "diff", ".diff": "diff", ".sh": "sh"}
SAME = {"c++": "cpp", "cuda": "cpp", "bash": "sh", "shell": "sh", "console": "sh", "py": "python"}


def lines(code, language):
    """The lines of the code as HTML; a span never goes over the end of a line."""
    pattern = LANGUAGES.get(SAME.get(language, language))
    if pattern is None:
        return html.escape(code, quote=False).split("\n")
    said, at = [], 0
    for match in pattern.finditer(code):
        said.append(html.escape(code[at:match.start()], quote=False))
        inner = html.escape(match[0], quote=False)
        opening = f'<span class="h-{match.lastgroup}">'
        said.append(opening + inner.replace("\n", "</span>\n" + opening) + "</span>")
        at = match.end()
    said.append(html.escape(code[at:], quote=False))
    return "".join(said).split("\n")


def block(code, language):
    """The code as HTML, without the newline at its end."""
    return "\n".join(lines(code.rstrip("\n"), language))
