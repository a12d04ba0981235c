"""The papers' claims, tested on small models: every seed is shown, and the verdict follows a stated rule."""
