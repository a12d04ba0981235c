"""The engine: a tick runs rows of any depth of any request in one forward of the backbone."""
