// Package tokenizer turns text into token ids and token ids into text, exactly as the tokenizer.json of a checkpoint
// prescribes.
//
// It supports the byte-pair-encoding tokenizers of the model families that moeserve runs: SentencePiece-like ones with
// byte fallback (Mixtral, Phi) and byte-level ones (Qwen2, Qwen3, OLMoE). For every text, ids equal those of the
// reference implementation, Hugging Face's tokenizers. An unsupported feature in a file is an error at load that names
// the feature and the file; the package never approximates.
//
// The package does not train, keeps no offsets, and neither truncates nor pads even if a file asks for it: in
// transformers, call arguments control both. Package models/chat renders chat templates.
//
// An added token that is matched on normalized text decodes to its content as the file spells it. Release 0.22 of the
// reference does the same; release 0.23 decodes it to its normalized form.
//
// # Use of the library
//
// The configuration types of github.com/sugarme/tokenizer parse tokenizer.json, and its decoders convert vocabulary
// entries to text where they are correct. Its encoder is not used, because its ids differ from the reference for all
// families. testdata/library_differences.json records the measured frequency of differences, and a test keeps the file
// up to date, so that this package's encoder can be removed once the library is correct.
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
