"""Style, script and content security policy of the status page.

The page contains the style and the script, so that it needs no other request. The policy lists the digests of the style
and the script. A browser therefore executes no other script, even if a hostile name, such as a run name, contains
script code.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

REFRESH_SECONDS: Final = 5

STYLE: Final = """
:root{color-scheme:light dark;--ground:#fff;--panel:#f6f7f9;--ink:#1b2027;--dim:#59636e;--line:#d8dde3;
--green:#1a7f37;--amber:#8a5700;--red:#c4271b;--blue:#0a62c4;--grey:#59636e}
@media (prefers-color-scheme:dark){:root{--ground:#0f1419;--panel:#171d24;--ink:#e4e8ec;--dim:#9aa5b1;--line:#2c3540;
--green:#4ac26b;--amber:#dba13c;--red:#ff7b70;--blue:#6cb2ff;--grey:#9aa5b1}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem 1.25rem 3rem;max-width:78rem;background:var(--ground);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.25rem;margin:0}h2{font-size:1.05rem;margin:1.75rem 0 .6rem}h3{font-size:1rem;margin:0;font-weight:600}
header{display:flex;flex-wrap:wrap;gap:.5rem .9rem;align-items:center}
.dim{color:var(--dim)}
.badge{display:inline-block;padding:.05rem .55rem;border:1px solid currentColor;border-radius:1rem;font-size:.82rem;
font-weight:600;white-space:nowrap}
.green{color:var(--green)}.amber{color:var(--amber)}.red{color:var(--red)}.blue{color:var(--blue)}.grey{color:var(--grey)}
.alarm{margin:.8rem 0 0;padding:.6rem .8rem;border-left:.3rem solid var(--red);background:var(--panel)}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.55rem 1.2rem;margin:.8rem 0 0}
dt{color:var(--dim);font-size:.8rem}dd{margin:0}
dl.wide{grid-template-columns:1fr}
article{border:1px solid var(--line);border-radius:.5rem;background:var(--panel);padding:.8rem 1rem;margin:0 0 .8rem}
.head{display:flex;flex-wrap:wrap;gap:.35rem .7rem;align-items:center}
progress{appearance:none;display:block;width:100%;height:.55rem;margin:.65rem 0 .25rem;border:0;border-radius:.3rem;
background:var(--line);overflow:hidden}
progress::-webkit-progress-bar{background:var(--line)}
progress::-webkit-progress-value{background:currentColor}
progress::-moz-progress-bar{background:currentColor}
.tag{border:1px solid var(--line);border-radius:.3rem;padding:0 .4rem;font-size:.82rem;background:var(--ground)}
.note{margin:.5rem 0 0;white-space:pre-wrap}
.why{margin:.45rem 0 0}
.scroll{overflow-x:auto;margin-top:.7rem}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.22rem .7rem .22rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td{overflow-wrap:break-word}tr:has(+.error) td{border:0}.error td{padding-top:0;color:var(--red)}
th{color:var(--dim);font-weight:500;white-space:nowrap}
.n{text-align:right;white-space:nowrap}
details{margin-top:.7rem}summary{cursor:pointer;color:var(--blue)}
code{font:.85em ui-monospace,SFMono-Regular,Menlo,monospace}
footer{margin-top:2rem;color:var(--dim);font-size:.85rem}
a{color:var(--blue)}
#stale{display:none}.lost #stale{display:inline-block}.lost main{opacity:.55}
@media (max-width:40rem){body{padding:.8rem .8rem 2rem}dl{grid-template-columns:repeat(2,minmax(0,1fr))}
dl.wide{grid-template-columns:1fr}.rare{display:none}}
""".strip()

SCRIPT: Final = f"""
setInterval(async()=>{{
if(document.hidden)return;
const root=document.documentElement;
try{{
const answer=await fetch(location.href,{{cache:"no-store",headers:{{Accept:"text/html"}}}});
if(!answer.ok)throw answer.status;
const next=new DOMParser().parseFromString(await answer.text(),"text/html");
for(const known of document.querySelectorAll("details[open]")){{
const same=next.getElementById(known.id);if(same)same.open=true}}
for(const part of ["header","main"])document.querySelector(part).replaceWith(next.querySelector(part));
document.title=next.title;root.classList.remove("lost")
}}catch{{root.classList.add("lost")}}
}},{REFRESH_SECONDS * 1000})
""".strip()


def _digest(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
