"""What people look at: plans, texts under a plan, curves, comparisons; as lines, tables and pictures."""
