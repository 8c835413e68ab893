"""The checks of the campaign, by part, and what runs and reports them."""
