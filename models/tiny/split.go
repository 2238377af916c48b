package tiny

// One prompt in testShare is a test prompt. tools/tiny/tasks.py holds the same function, over tokens.
const (
	testShare = 16
	hashBase  = 0x100000001b3
	hashMix   = 0xff51afd7ed558ccd
)

// HeldOut tells whether a prompt, without any chat template around it, belongs to the test split. The model has never
// been trained on such a prompt, neither bare nor in a chat.
//
// The hash is a polynomial in the prompt's bytes, each plus one, modulo 2^64, and then mixed.
func HeldOut(prompt string) bool {
	var h uint64
	for i := range len(prompt) {
		h = h*hashBase + uint64(prompt[i]) + 1
	}
	h ^= h >> 33
	h *= hashMix
	h ^= h >> 33
	return h%testShare == 0
}
