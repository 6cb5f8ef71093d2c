"""One model over several processes: their group, who leads it, who follows."""
