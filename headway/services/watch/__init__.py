"""This package serves the page of `headway watch` over HTTP, or writes it to a file (`headway report --html`).

It owns routes, access control, shared answers and the page's files in ``static``; the answers' contents come from
``report/watch``. Begin with ``app.py``.
"""
