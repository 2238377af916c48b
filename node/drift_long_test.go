//go:build simulate

package node_test

func init() {
	tasksInTurn = []string{"addition", "sorting", "reversing", "recall", "sentences", "addition"}
}
