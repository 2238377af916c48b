package tokenizer

import "testing"

// BenchmarkEncode reports tokens per second over a megabyte of mixed text (English dialogues, then the strings of the vectors:
// many scripts, spaces, symbols, malformed words): first passes of a tokenizer that has seen nothing yet, and later ones.
func BenchmarkEncode(b *testing.B) {
	text := longTexts(b)["mixed"][0]
	for _, family := range families {
		tok := loadFamily(b, family)
		run := func(name string, before func()) {
			b.Run("family="+family+"/cache="+name, func(b *testing.B) {
				b.SetBytes(int64(len(text)))
				b.ReportAllocs()
				n := 0
				for b.Loop() {
					before()
					n += len(must(tok.Encode(text, false)))
				}
				b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "tokens/s")
			})
		}
		run("cold", func() { tok.model.cache = newWordCache() })
		run("warm", func() {})
	}
}

// BenchmarkDecode reports tokens per second of decoding the same text.
func BenchmarkDecode(b *testing.B) {
	text := longTexts(b)["mixed"][0]
	for _, family := range families {
		tok := loadFamily(b, family)
		ids := must(tok.Encode(text, false))
		b.Run("family="+family, func(b *testing.B) {
			for b.Loop() {
				tok.Decode(ids, true)
			}
			b.ReportMetric(float64(len(ids)*b.N)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

// BenchmarkLoad reports the time that reading a tokenizer takes.
func BenchmarkLoad(b *testing.B) {
	for _, family := range families {
		b.Run("family="+family, func(b *testing.B) {
			for b.Loop() {
				loadFamily(b, family)
			}
		})
	}
}
