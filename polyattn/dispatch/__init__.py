"""Which kernel of which backend runs, where, and how arrays get there."""
