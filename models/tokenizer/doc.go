// Package tokenizer turns text into token ids and token ids into text, exactly as the tokenizer.json of a checkpoint
// prescribes.
//
// It reads the byte-pair-encoding tokenizers of the model families that moeserve runs: SentencePiece-like ones with
// byte fallback (Mixtral, Phi) and byte-level ones (Qwen2, Qwen3, OLMoE). Ids equal those of the reference
// implementation, Hugging Face's tokenizers, for every text. Anything that a file asks for and that this package does
// not do is an error at load which names the feature and the file; nothing is ever approximated.
//
// It is not a trainer, keeps no offsets, and neither truncates nor pads, also where a file asks for it: as
// transformers, whose calls leave that to their arguments. Chat templates are models/chat.
//
// An added token that is matched on normalized text decodes to its content as the file spells it. Releases of the
// reference disagree there: 0.22 does the same, 0.23 decodes it to its normalized form.
//
// # Where the library ends
//
// The shape of tokenizer.json is read into the configuration types of github.com/sugarme/tokenizer, and its decoders
// turn vocabulary entries into text where they are right. Its encoder is not used, because its ids differ from the
// reference for all families; testdata/library_differences.json holds how often, measured, and a test keeps that list
// true, so that our encoder can go the day the library is right.
//
// # Invariants
//
//   - A *BPE is immutable but for its bounded word cache, and safe for concurrent use. A Stream belongs
//     to one goroutine.
//   - Encoding takes O(n log n) time for n bytes of any text.
//   - Decode(ids, skip) equals the concatenation of all Push results and the Flush of a Stream over the same ids, and
//     each of those pieces is valid UTF-8.
//   - Ids that the tokenizer does not have decode to nothing.
//
// # Example
//
//	tok, err := tokenizer.Parse(tokenizerJSON, tokenizerConfigJSON)
//	if err != nil {
//		return err
//	}
//	ids := tok.Encode("Hello, world", true)
//	s := tok.NewStream(true)
//	for _, id := range ids {
//		fmt.Print(s.Push(id))
//	}
//	fmt.Print(s.Flush())
package tokenizer
