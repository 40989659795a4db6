"""Root file systems of sandboxes from images: parsing, unpacking, and a store that is shared by processes.

The package owns archives, layers, merged trees and their store on disk. Names and links of an archive are resolved in
``tree.py``, never by the kernel. Begin reading with ``resolve.py``, then ``store.py``.
"""
