"""The configuration tree of a run and how recipes become one."""
