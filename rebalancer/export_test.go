package rebalancer

// SimilarLinks is the ratio of rates up to which links count as equal.
const SimilarLinks = similarLinks
