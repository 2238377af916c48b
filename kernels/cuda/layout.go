package cuda

import "github.com/moeserve/moeserve/kernels"

// ExpertLayout implements kernels.Backend.
func (b *Backend) ExpertLayout(s kernels.ExpertShape) (kernels.ExpertLayout, error) {
	return kernels.RowMajorLayout("cuda", s)
}

func checkLayout(op string, l *kernels.ExpertLayout) error {
	return kernels.CheckRowMajor("cuda", op, *l)
}

// PackExpert implements kernels.Backend.
func (b *Backend) PackExpert(l kernels.ExpertLayout, part kernels.Part, row int, src, dst []byte) error {
	return kernels.PackRowMajor("cuda", l, part, row, src, dst)
}
