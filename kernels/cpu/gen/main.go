//go:build avo

// Package main writes the assembly of package cpu, with avo: the same kernels for
// AVX2 and for AVX-512. `go generate ./kernels/cpu` runs it. What it writes is
// committed, and the build tag keeps avo out of every other build.
//
// What a kernel computes, and in which order, is said in its own comment, which
// also stands in stubs_amd64.go.
package main

import (
	"fmt"
	"math"
	"strings"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// panel is how many weight rows a tile has, and strip how many are read from
// memory at once: there fewer are better, as processors foresee what few streams
// will load. Package cpu has the same.
const (
	panel = 6
	strip = panel / 2
)

// isa is an instruction set.
type isa struct {
	suffix string
	bytes  int // of a vector
	rows   int // rows of x in a tile: as many as its sums and operands have registers
	vector func() reg.VecVirtual
}

func main() {
	constants()
	pause()
	for _, v := range []isa{
		{"AVX2", 32, 2, build.YMM},
		{"AVX512", 64, 4, build.ZMM},
	} {
		v.tile()
		for _, rows := range []int{1, v.rows} {
			for _, t := range types {
				v.direct(t, rows)
			}
		}
		for _, t := range types {
			v.pack(t)
			v.widen(t)
		}
		v.tiles(types[1])
		v.tiles(types[2])
		v.addTiles()
		v.weightedSum()
		v.expSum()
		v.siluMul()
		v.read()
		v.multiplyAdds()
	}
	build.Generate()
}

func (v isa) lanes() int { return v.bytes / 4 }

func (v isa) wide() bool { return v.bytes == 64 }

// function begins a kernel of this instruction set.
func (v isa) function(name, signature, doc string, args ...any) {
	build.TEXT(name+v.suffix, attr.NOSPLIT, signature)
	build.Pragma("noescape")
	build.Doc(wrap(name + v.suffix + " " + fmt.Sprintf(doc, args...))...)
}

// wrap breaks text into lines.
func wrap(text string) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > 77 {
			lines = append(lines, line)
			line = ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return append(lines, line)
}

func end() {
	build.VZEROUPPER()
	build.RET()
}

// loop runs body n times; n may be 0.
func loop(name string, n reg.GPVirtual, body func()) {
	build.TESTQ(n, n)
	build.JZ(operand.LabelRef(name + "_end"))
	build.Label(name)
	body()
	build.DECQ(n)
	build.JNZ(operand.LabelRef(name))
	build.Label(name + "_end")
}

func mem(base reg.Register, disp int) operand.Mem { return operand.Mem{Base: base, Disp: disp} }

func base(param string) reg.GPVirtual {
	return build.Load(build.Param(param).Base(), build.GP64()).(reg.GPVirtual)
}

func length(param string) reg.GPVirtual {
	return build.Load(build.Param(param).Len(), build.GP64()).(reg.GPVirtual)
}

func load(param string) reg.GPVirtual {
	return build.Load(build.Param(param), build.GP64()).(reg.GPVirtual)
}

func (v isa) zeros(n int) []reg.VecVirtual {
	r := make([]reg.VecVirtual, n)
	for i := range r {
		r[i] = v.vector()
		v.clear(r[i])
	}
	return r
}

func (v isa) clear(r reg.VecVirtual) {
	if v.wide() {
		build.VPXORD(r, r, r)
	} else {
		build.VPXOR(r, r, r)
	}
}

// element is a type of weights.
type element struct {
	name  string
	bytes int
	// load puts one vector's worth of elements at m into to, as float32.
	load func(m operand.Mem, to reg.VecVirtual)
}

var types = []element{
	{"F32", 4, func(m operand.Mem, to reg.VecVirtual) { build.VMOVUPS(m, to) }},
	{"BF16", 2, func(m operand.Mem, to reg.VecVirtual) {
		build.VPMOVZXWD(m, to)
		build.VPSLLD(operand.U8(16), to, to)
	}},
	{"F16", 2, func(m operand.Mem, to reg.VecVirtual) { build.VCVTPH2PS(m, to) }},
}

// reduce adds up the lanes of each of r, and returns the sums, in order, in as
// few registers as hold them. Every sum is made by the same tree: lane i is added
// to lane i + half of the lanes, until one is left.
func (v isa) reduce(r []reg.VecVirtual) []reg.VecVirtual {
	var sums []reg.VecVirtual
	for ; len(r) > v.lanes(); r = r[v.lanes():] {
		sums = append(sums, v.reduceFew(r[:v.lanes()]))
	}
	return append(sums, v.reduceFew(r))
}

// fold sets a to the sum of two selections of b and a.
func (v isa) fold(first, second func(b, a, to reg.VecVirtual), a, b reg.VecVirtual) {
	t, u := v.vector(), v.vector()
	first(b, a, t)
	second(b, a, u)
	build.VADDPS(u, t, a)
}

// reduceFew is reduce for at least 3 registers and at most as many as there are
// lanes. Element e of the sum's 128-bit lane l comes from register 4l + e.
func (v isa) reduceFew(r []reg.VecVirtual) reg.VecVirtual {
	var quads [4]reg.VecVirtual
	for e := range quads {
		from := []reg.VecVirtual{}
		if e >= len(r) {
			break
		}
		for i := e; i < len(r); i += 4 {
			from = append(from, r[i])
		}
		if v.wide() {
			shuffle := func(imm operand.U8) func(b, a, to reg.VecVirtual) {
				return func(b, a, to reg.VecVirtual) { build.VSHUFF64X2(imm, b, a, to) }
			}
			for i := 0; i < len(from); i += 2 {
				v.fold(shuffle(0x44), shuffle(0xee), from[i], from[min(i+1, len(from)-1)])
			}
			v.fold(shuffle(0x88), shuffle(0xdd), from[0], from[min(2, len(from)-1)&^1])
		} else {
			half := func(imm operand.U8) func(b, a, to reg.VecVirtual) {
				return func(b, a, to reg.VecVirtual) { build.VPERM2F128(imm, b, a, to) }
			}
			v.fold(half(0x20), half(0x31), from[0], from[len(from)-1])
		}
		quads[e] = from[0]
	}
	if len(r) == 3 { // what stands in for a fourth is not used
		quads[3] = quads[2]
	}
	low := func(b, a, to reg.VecVirtual) { build.VUNPCKLPD(b, a, to) }
	high := func(b, a, to reg.VecVirtual) { build.VUNPCKHPD(b, a, to) }
	v.fold(low, high, quads[0], quads[1])
	v.fold(low, high, quads[2], quads[3])
	even := func(b, a, to reg.VecVirtual) { build.VSHUFPS(operand.U8(0x88), b, a, to) }
	odd := func(b, a, to reg.VecVirtual) { build.VSHUFPS(operand.U8(0xdd), b, a, to) }
	v.fold(even, odd, quads[0], quads[2])
	return quads[0]
}

// total adds up the lanes of r into the first.
func (v isa) total(r reg.VecVirtual) reg.VecVirtual {
	y := r
	if v.wide() {
		half := build.YMM()
		build.VEXTRACTF64X4(operand.U8(1), r, half)
		build.VADDPS(half, r.AsY(), half)
		y = half
	}
	x := build.XMM()
	build.VEXTRACTF128(operand.U8(1), y.AsY(), x)
	build.VADDPS(x, y.AsX(), x)
	t := build.XMM()
	build.VPERMILPS(operand.U8(0x0e), x, t)
	build.VADDPS(t, x, x)
	build.VPERMILPS(operand.U8(0x01), x, t)
	build.VADDPS(t, x, x)
	return x
}

// addTo adds the first n lanes of the sums to the elements at p; behind n, up to
// the next power of two of lanes, anything may be added.
func (v isa) addTo(p reg.Register, sums []reg.VecVirtual, n int) {
	for i, s := range sums {
		var r reg.Register = s
		switch left := n - i*v.lanes(); {
		case left <= 4:
			r = s.AsX()
		case left <= 8:
			r = s.AsY()
		}
		m := mem(p, i*v.bytes)
		build.VADDPS(m, r, r)
		build.VMOVUPS(r, m)
	}
}

// multiply adds the products of rows vectors at x and some vectors of weights to
// the sums, of which [r*columns+c] is that of row r and weight row c.
func (v isa) multiply(sums []reg.VecVirtual, rows, columns int, x operand.Mem, weights func(c int, to reg.VecVirtual)) {
	xs := make([]reg.VecVirtual, rows)
	for r := range xs {
		xs[r] = v.vector()
		build.VMOVUPS(x.Offset(r*v.bytes), xs[r])
	}
	for c := range columns {
		w := v.vector()
		weights(c, w)
		for r := range xs {
			build.VFMADD231PS(w, xs[r], sums[r*columns+c])
		}
	}
}

func (v isa) tile() {
	v.function("tile", "func(sums, x, w []float32)",
		`adds to sums[%d r + c] the product of row r of x and row c of w: %d and %d
rows, packed, of len(w) / %d elements, a multiple of %d. A sum's lanes take every
%[5]dth element each, in order, fused, and are added up at the end.`, panel, v.rows, panel, panel, v.lanes())
	sums, x, w, n := v.zeros(v.rows*panel), base("x"), base("w"), length("w")
	v.divide(n, "tile", func() {
		v.multiply(sums, v.rows, panel, mem(x, 0), func(c int, to reg.VecVirtual) { build.VMOVUPS(mem(w, c*v.bytes), to) })
		build.ADDQ(operand.U32(v.rows*v.bytes), x)
		build.ADDQ(operand.U32(panel*v.bytes), w)
	}, panel*v.lanes())
	v.addTo(base("sums"), v.reduce(sums), len(sums))
	end()
}

// divide runs body once for each full step of n elements.
func (v isa) divide(n reg.GPVirtual, name string, body func(), step int) {
	build.SUBQ(operand.U32(step), n)
	build.JL(operand.LabelRef(name + "_end"))
	build.Label(name)
	body()
	build.SUBQ(operand.U32(step), n)
	build.JGE(operand.LabelRef(name))
	build.Label(name + "_end")
}

func (v isa) direct(t element, rows int) {
	what := "the row x"
	if rows > 1 {
		what = fmt.Sprintf("row r of the %d packed rows x", rows)
	}
	v.function(fmt.Sprintf("direct%sx%d", t.name, rows), "func(sums, x []float32, w uintptr, stride int, next uintptr)",
		`adds to sums[%d r + c] the product of %s and weight row c, which lies c stride
bytes behind w. Rows of x: %d, of a multiple of %d elements, summed as tile%s does.
Of sums, %d are written, of which the first %d mean something. As many bytes from next on are fetched into the first cache.`,
		strip, what, rows, v.lanes(), v.suffix, (rows*strip+7)/8*8, rows*strip)
	sums, x, n := v.zeros(rows*strip), base("x"), length("x")
	from := strips{load("w"), load("stride"), load("next")}
	v.lines(t, n, rows*v.lanes(), from, rows == 1, func(steps int) {
		for i := range steps {
			v.multiply(sums, rows, strip, mem(x, i*rows*v.bytes), func(c int, to reg.VecVirtual) {
				t.load(from.row(c).Offset(i*v.lanes()*t.bytes), to)
			})
		}
		build.ADDQ(operand.U32(steps*rows*v.bytes), x)
	})
	v.addTo(base("sums"), v.reduce(sums), (len(sums)+7)/8*8)
	end()
}

// strips are weight rows in memory, a strip of them at a time.
type strips struct{ w, stride, next reg.GPVirtual }

// row is where the loop stands in row c.
func (p strips) row(c int) operand.Mem { return p.at(p.w, c) }

func (p strips) at(base reg.Register, c int) operand.Mem {
	m := mem(base, 0)
	if c > 0 {
		m.Index, m.Scale = p.stride, uint8(c)
	}
	return m
}

// lines runs body over a strip, n elements at step elements a vector: a cache line
// of each row at a time, and vectors one by one at the end. With each it asks for
// as many lines of what comes next, in the order of their addresses, which memory
// likes best.
func (v isa) lines(t element, n reg.GPVirtual, step int, w strips, inOrder bool, body func(vectors int)) {
	run := func(name string, vectors int) {
		v.divide(n, name, func() {
			if vectors > 1 || v.lanes()*t.bytes == 64 {
				for c := range strip {
					if inOrder {
						build.PREFETCHT0(mem(w.next, 64*c))
					} else {
						build.PREFETCHT0(w.at(w.next, c))
					}
				}
				if inOrder {
					build.ADDQ(operand.U32(64*strip), w.next)
				} else {
					build.ADDQ(operand.U32(64), w.next)
				}
			}
			body(vectors)
			build.ADDQ(operand.U32(vectors*v.lanes()*t.bytes), w.w)
		}, vectors*step)
	}
	if line := 64 / (v.lanes() * t.bytes); line > 1 {
		run("line", line)
		build.ADDQ(operand.U32(line*step), n)
	}
	run("vector", 1)
}

// tiles multiplies rows with the tiles of a unit of an expert in the layout kernels.Tiles, from
// one end of memory to the other. Sums are in memory, which the first cache holds.
func (v isa) tiles(t element) {
	const columns, rowBytes, tileBytes, turns = 64, 128, 8192, 8
	v.function("tiles"+t.name, "func(sums, x *float32, stride int, w uintptr, rows, blocks, steps int)",
		`adds to vector [j*rows + r] of sums the products of the vectors of row r of x
with those of row j of that many consecutive tiles, in order, fused: tile s begins
s*%d bytes behind w, and has 8 weight rows of %d bytes in each of the first blocks,
whose chunks of 16 bytes are swizzled. Row r of x begins r*stride bytes behind x;
its elements of tile s begin s*%d elements further.`, tileBytes, rowBytes, columns)
	x, stride, w, rows, steps := load("x"), load("stride"), load("w"), load("rows"), load("steps")
	// As many weight rows at once as there are registers for: their sums do not wait for each other.
	group, vectors := 1, columns/v.lanes()
	if v.wide() {
		group = 4
	}
	weights, xs, sums := make([]reg.VecVirtual, group*vectors), make([]reg.VecVirtual, vectors), make([]reg.VecVirtual, group)
	for _, all := range [][]reg.VecVirtual{weights, xs, sums} {
		for i := range all {
			all[i] = v.vector()
		}
	}
	at, third, row, block, left, from, step := build.GP64(), build.GP64(), build.GP64(), build.GP64(), build.GP64(), build.GP64(), build.GP64()
	build.IMUL3Q(operand.U32(v.bytes), rows, step) // from the sums of a weight row to those of the next
	sumAt := func(j int) operand.Mem {
		m := mem([]reg.Register{at, third}[j/2], 0)
		if j%2 == 1 {
			m.Index, m.Scale = step, 1
		}
		return m
	}
	loop("step", steps, func() {
		build.Load(build.Param("sums"), at)
		build.MOVQ(w, from)
		build.Load(build.Param("blocks"), block)
		loop("block", block, func() {
			for first := 0; first < turns; first += group {
				for j := range group {
					turn := first + j
					for line := range rowBytes / 64 {
						build.PREFETCHT0(mem(from, tileBytes+turn*rowBytes+64*line))
					}
					for i, to := range weights[j*vectors:][:vectors] {
						chunks := v.lanes() * t.bytes / 16
						t.load(mem(from, turn*rowBytes+(i*chunks^turn&^(chunks-1))*16), to)
						if chunks == 2 && turn&1 == 1 {
							build.VSHUFF64X2(operand.U8(0x4e), to, to, to)
						}
					}
				}
				build.MOVQ(x, row)
				build.MOVQ(rows, left)
				if group > 2 {
					build.LEAQ(operand.Mem{Base: at, Index: step, Scale: 2}, third)
				}
				name := fmt.Sprintf("row%d", first)
				build.Label(name) // there is at least one row
				for j, sum := range sums {
					build.VMOVUPS(sumAt(j), sum)
				}
				for i := range vectors {
					if group > 1 {
						build.VMOVUPS(mem(row, i*v.bytes), xs[i])
					}
					for j, sum := range sums {
						if group > 1 {
							build.VFMADD231PS(xs[i], weights[j*vectors+i], sum)
						} else {
							build.VFMADD231PS(mem(row, i*v.bytes), weights[i], sum)
						}
					}
				}
				for j, sum := range sums {
					build.VMOVUPS(sum, sumAt(j))
				}
				build.ADDQ(operand.U32(v.bytes), at)
				if group > 2 {
					build.ADDQ(operand.U32(v.bytes), third)
				}
				build.ADDQ(stride, row)
				build.DECQ(left)
				build.JNZ(operand.LabelRef(name))
				if group > 2 { // at is behind the sums of the group's first row
					build.LEAQ(operand.Mem{Base: third, Index: step, Scale: 1}, at)
				}
			}
			build.ADDQ(operand.U32(turns*rowBytes), from)
		})
		build.ADDQ(operand.U32(tileBytes), w)
		build.ADDQ(operand.U32(4*columns), x)
	})
	end()
}

func (v isa) addTiles() {
	v.function("addTiles", "func(to, sums *float32, n int)",
		`adds up the lanes of each of n vectors of sums, a multiple of %d, adds the results
to the elements of to, and clears the vectors.`, v.lanes())
	to, from, n := load("to"), load("sums"), load("n")
	v.divide(n, "group", func() {
		sums := make([]reg.VecVirtual, v.lanes())
		zero := v.vector()
		for i := range sums {
			sums[i] = v.vector()
			build.VMOVUPS(mem(from, i*v.bytes), sums[i])
		}
		total := v.reduceFew(sums)
		build.VADDPS(mem(to, 0), total, total)
		build.VMOVUPS(total, mem(to, 0))
		v.clear(zero)
		for i := range sums {
			build.VMOVUPS(zero, mem(from, i*v.bytes))
		}
		build.ADDQ(operand.U32(v.lanes()*v.bytes), from)
		build.ADDQ(operand.U32(v.bytes), to)
	}, v.lanes())
	end()
}

func (v isa) pack(t element) {
	v.function("pack"+t.name, "func(dst *float32, w uintptr, stride int, next uintptr, n int)",
		`packs n elements, a multiple of %d, of %d weight rows, stride bytes behind each
other from w on, as half of a panel. As many bytes from next on are fetched
into the first cache.`, v.lanes(), strip)
	dst, n := load("dst"), load("n")
	from := strips{load("w"), load("stride"), load("next")}
	v.lines(t, n, v.lanes(), from, false, func(vectors int) {
		for i := range vectors {
			for c := range strip {
				r := v.vector()
				t.load(from.row(c).Offset(i*v.lanes()*t.bytes), r)
				build.VMOVUPS(r, mem(dst, (i*panel+c)*v.bytes))
			}
		}
		build.ADDQ(operand.U32(vectors*panel*v.bytes), dst)
	})
	end()
}

func (v isa) widen(t element) {
	v.function("widen"+t.name, "func(dst *float32, step int, src uintptr, vectors int)",
		`converts that many vectors of %d elements at src to float32. A vector's
result begins step bytes behind the one before it.`, v.lanes())
	dst, step, src, n := load("dst"), load("step"), load("src"), load("vectors")
	loop("vector", n, func() {
		r := v.vector()
		t.load(mem(src, 0), r)
		build.VMOVUPS(r, mem(dst, 0))
		build.ADDQ(operand.U32(v.lanes()*t.bytes), src)
		build.ADDQ(step, dst)
	})
	end()
}

func (v isa) weightedSum() {
	const block = 8 // vectors at once
	v.function("weightedSum", "func(out, p []float32, rows []uint64)",
		`adds to out[i], for all i, the sum of p[j] times element i of the row at
address rows[j], in order of j, fused. len(out) is a multiple of %d.`, v.lanes())
	out, left := base("out"), length("out")
	at := build.GP64()
	build.XORQ(at, at) // bytes of a row that are done
	columns := func(name string, vectors int) {
		v.divide(left, name, func() {
			sums := v.zeros(vectors)
			p, rows, n := base("p"), base("rows"), length("p")
			loop(name+"_row", n, func() {
				row, w := build.GP64(), v.vector()
				build.MOVQ(mem(rows, 0), row)
				build.VBROADCASTSS(mem(p, 0), w)
				for i, s := range sums {
					build.VFMADD231PS(operand.Mem{Base: row, Index: at, Scale: 1, Disp: i * v.bytes}, w, s)
				}
				build.ADDQ(operand.U32(8), rows)
				build.ADDQ(operand.U32(4), p)
			})
			for i, s := range sums {
				m := operand.Mem{Base: out, Index: at, Scale: 1, Disp: i * v.bytes}
				build.VADDPS(m, s, s)
				build.VMOVUPS(s, m)
			}
			build.ADDQ(operand.U32(vectors*v.bytes), at)
		}, vectors*v.lanes())
		build.ADDQ(operand.U32(vectors*v.lanes()), left)
	}
	columns("block", block)
	columns("vector", 1)
	end()
}

// Constants of the exponential: e^x is 2^n e^r, where n is x / ln 2 rounded to
// nearest and r the rest, with ln 2 in two parts of which the first has so few
// bits that n times it is exact.
var (
	expLow, expHigh     operand.Mem // beyond them e^x is 0 or infinite
	log2E, ln2Hi, ln2Lo operand.Mem
	one, signs, bias    operand.Mem
	expTerms            []operand.Mem // of (e^r - 1 - r) / r^2, from the constant on
)

func vectorConstant(name string, value operand.Constant) operand.Mem {
	m := build.GLOBL(name, attr.RODATA|attr.NOPTR)
	for i := range 64 / 4 {
		build.DATA(4*i, value)
	}
	return m
}

func constants() {
	f := func(name string, x float64) operand.Mem {
		return vectorConstant(name, operand.U32(math.Float32bits(float32(x))))
	}
	hi := float64(math.Float32frombits(math.Float32bits(math.Ln2) &^ 0xfff))
	expLow, expHigh = f("expLow", -104), f("expHigh", 89)
	log2E, ln2Hi, ln2Lo = f("log2E", math.Log2E), f("ln2Hi", hi), f("ln2Lo", math.Ln2-hi)
	one, signs, bias = f("one", 1), vectorConstant("signs", operand.U32(1<<31)), vectorConstant("bias", operand.U32(127))
	for i, c := range interpolate(5, math.Ln2/2) {
		expTerms = append(expTerms, f(fmt.Sprintf("expTerm%d", i+2), c))
	}
}

// interpolate returns the coefficients of the polynomial with n terms that has
// the values of (e^r - 1 - r) / r^2 at the Chebyshev nodes of [-limit, limit].
func interpolate(n int, limit float64) []float64 {
	system := make([][]float64, n) // rows of powers and value
	for i := range system {
		r := limit * math.Cos(math.Pi*(float64(i)+0.5)/float64(n))
		power := 1.0
		for range n {
			system[i] = append(system[i], power)
			power *= r
		}
		value, term := 0.0, 0.5
		for k := 3.0; k < 30; k++ {
			value += term
			term *= r / k
		}
		system[i] = append(system[i], value)
	}
	for i := range system {
		for j := range system {
			if i == j {
				continue
			}
			factor := system[j][i] / system[i][i]
			for k := range system[j] {
				system[j][k] -= factor * system[i][k]
			}
		}
	}
	c := make([]float64, n)
	for i := range c {
		c[i] = system[i][n] / system[i][i]
	}
	return c
}

// exp sets x to e^x.
func (v isa) exp(x reg.VecVirtual) {
	low, n, p := v.vector(), v.vector(), v.vector()
	build.VMOVUPS(expLow, low)
	build.VMAXPS(x, low, x) // of a NaN and a number these return their second operand, x
	build.VMOVUPS(expHigh, low)
	build.VMINPS(x, low, x)
	build.VMULPS(log2E, x, n)
	if v.wide() {
		build.VRNDSCALEPS(operand.U8(8), n, n)
	} else {
		build.VROUNDPS(operand.U8(8), n, n)
	}
	build.VFNMADD231PS(ln2Hi, n, x)
	build.VFNMADD231PS(ln2Lo, n, x)
	last := len(expTerms) - 1
	build.VMOVUPS(expTerms[last], p)
	for i := last - 1; i >= 0; i-- {
		build.VFMADD213PS(expTerms[i], x, p)
	}
	build.VFMADD213PS(one, x, p)
	build.VFMADD213PS(one, x, p)
	if v.wide() {
		build.VSCALEFPS(n, p, x)
		return
	}
	// 2^n in two factors, as it may be beyond the range of exponents.
	half := v.vector()
	build.VCVTPS2DQ(n, n)
	build.VPSRAD(operand.U8(1), n, half)
	build.VPSUBD(half, n, n)
	for _, m := range []reg.VecVirtual{n, half} {
		build.VPADDD(bias, m, m)
		build.VPSLLD(operand.U8(23), m, m)
		build.VMULPS(m, p, p)
	}
	build.VMOVUPS(p, x)
}

func (v isa) expSum() {
	v.function("expSum", "func(x []float32, shift float32) float32",
		`replaces x[i] by e^(x[i] - shift) and returns the sum: lanes take every %dth
element each, in order, and are added up at the end. len(x) is a multiple of
%[1]d.`, v.lanes())
	x, n := base("x"), length("x")
	shift, sum := v.vector(), v.zeros(1)[0]
	m, err := build.Param("shift").Resolve()
	if err != nil {
		panic(err)
	}
	build.VBROADCASTSS(m.Addr, shift)
	v.divide(n, "vector", func() {
		e := v.vector()
		build.VMOVUPS(mem(x, 0), e)
		build.VSUBPS(shift, e, e)
		v.exp(e)
		build.VMOVUPS(e, mem(x, 0))
		build.VADDPS(e, sum, sum)
		build.ADDQ(operand.U32(v.bytes), x)
	}, v.lanes())
	build.Store(v.total(sum), build.ReturnIndex(0))
	end()
}

func (v isa) siluMul() {
	v.function("siluMul", "func(out, gate, up []float32)",
		`sets out[i] to gate[i] / (1 + e^-gate[i]) * up[i]. len(out) is a multiple of
%d.`, v.lanes())
	out, gate, up, n := base("out"), base("gate"), base("up"), length("out")
	v.divide(n, "vector", func() {
		g, e := v.vector(), v.vector()
		build.VMOVUPS(mem(gate, 0), g)
		if v.wide() {
			build.VPXORD(signs, g, e)
		} else {
			build.VXORPS(signs, g, e)
		}
		v.exp(e)
		build.VADDPS(one, e, e)
		build.VDIVPS(e, g, g)
		build.VMULPS(mem(up, 0), g, g)
		build.VMOVUPS(g, mem(out, 0))
		for _, p := range []reg.GPVirtual{out, gate, up} {
			build.ADDQ(operand.U32(v.bytes), p)
		}
	}, v.lanes())
	end()
}

func (v isa) read() {
	const block = 8
	v.function("read", "func(p []byte)",
		`loads all of p, whose length is a multiple of %d: what memory gives.`, block*v.bytes)
	p, n := base("p"), length("p")
	sums := v.zeros(block)
	v.divide(n, "block", func() {
		for i, s := range sums {
			if v.wide() {
				build.VPORD(mem(p, i*v.bytes), s, s)
			} else {
				build.VPOR(mem(p, i*v.bytes), s, s)
			}
		}
		build.ADDQ(operand.U32(block*v.bytes), p)
	}, block*v.bytes)
	end()
}

func pause() {
	build.TEXT("pause", attr.NOSPLIT, "func(n int)")
	build.Pragma("noescape")
	build.Doc("pause tells the processor n times that a goroutine polls.")
	loop("pause", load("n"), func() { build.PAUSE() })
	build.RET()
}

func (v isa) multiplyAdds() {
	const chains = 12 // more than latency times units
	v.function("multiplyAdds", "func(rounds int)",
		`carries out that many times %d fused multiply-adds of %d lanes that do not
depend on each other: what the arithmetic units give.`, chains, v.lanes())
	n, sums := load("rounds"), v.zeros(chains)
	x := v.zeros(1)[0]
	loop("round", n, func() {
		for _, s := range sums {
			build.VFMADD231PS(x, x, s)
		}
	})
	end()
}
