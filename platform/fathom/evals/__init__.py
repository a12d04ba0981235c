"""How good a model is: held-out likelihood by depth, graded answers, and the plots of a run."""
