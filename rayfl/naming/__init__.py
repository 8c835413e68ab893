"""How configurations name things: users' own objects, texts of a form, and the nearest of known names."""
