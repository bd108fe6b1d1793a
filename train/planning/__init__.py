"""What a plan is computed with: laws of the loss, links, candidates, bandwidths."""
