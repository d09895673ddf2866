"""How the model runs on the mesh: every collective stands here."""
