// Package tokenizer turns text into token ids and token ids into text, exactly as the tokenizer.json of a checkpoint
// prescribes.
//
// It supports byte-pair encoding, SentencePiece-like with byte fallback (Mixtral, Phi) and byte-level (Qwen2, Qwen3,
// OLMoE, Llama 3, GPT-4o, DeepSeek), and Unigram models. For every text, ids equal those of the reference implementation,
// Hugging Face's tokenizers. An unsupported feature in a file is an error at load that names the feature; the package
// never approximates.
//
// The package does not train, keeps no offsets, and neither truncates nor pads even if a file asks for it: in
// transformers, call arguments control both. Package models/chat renders chat templates.
//
// An added token that is matched on normalized text decodes to its content as the file spells it. Release 0.22 of the
// reference does the same; release 0.23 decodes it to its normalized form.
//
// # Use of the library
//
// The configuration types of github.com/sugarme/tokenizer describe tokenizer.json, and its table of bytes and characters
// is that of byte-level vocabularies. What is stricter than the types (missing ids, unknown members, versions) is checked
// by this package.
//
// The library's encoder is not used, because its ids differ from the reference for all families: for 53 % of 2,944 strings
// with Mixtral's tokenizer, for 69 % with Phi-3's; Qwen2's does not load. Of its normalizers, Lowercase differs, Strip
// panics, and Replace takes time that grows with the square of the text. Its decoders panic on empty tokens.
// testdata/library_differences.json records how often encoder and decoders differ, and a test measures it, so that this
// package's encoder can be removed once the library's is exact.
//
// # Patterns
//
// The split patterns of GPT-2, Qwen2 and Llama 3 have matchers of their own, which take a few nanoseconds for a
// character. All other regular expressions go through package internal/pattern.
//
// # Invariants
//
//   - A *Pipeline is immutable but for its bounded word cache, and safe for concurrent use. A Stream belongs
//     to one goroutine.
//   - Encoding takes O(n log n) time for n bytes of any text, with regular expressions a bounded number of steps for each
//     byte: a text that takes one more steps is an error. What normalizers can make of a text is bounded at load.
//   - With EncodeOptions.Limit, encoding a text of any length takes the memory of the normalized text and of that many ids.
//   - In the ranges of EncodeOptions.Plain no added token is matched but for white space, and no special token comes of
//     merges: what a client sends there is text to the model.
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
//	ids, err := tok.Encode("Hello, world", true)
//	if err != nil {
//		return err
//	}
//	s := tok.NewStream(true)
//	for _, id := range ids {
//		fmt.Print(s.Push(id))
//	}
//	fmt.Print(s.Flush())
package tokenizer
