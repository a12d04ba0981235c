"""Keys and values: one pool of pages, and per request and depth an append-only list of them."""
