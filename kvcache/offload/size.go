package offload

// HostBytes is the pinned host memory that the tiers of c allocate, in bytes, for a KV cache of
// blocks of so many tokens and bytes. An error says which of c's block sizes does not fit these.
func (c Config) HostBytes(blockTokens int, blockBytes int64) (int64, error) {
	factor, err := c.factor(blockTokens)
	if err != nil {
		return 0, err
	}
	block := int64(factor) * blockBytes
	n := int64(c.CPUBlocks) * block
	if c.CPUBytes > 0 {
		n = c.CPUBytes / block * block
	}
	if c.FileBlocks > 0 {
		n += fileStagingBytes(block)
	}
	return n, nil
}
