package engine

// Turn runs one step, if there is anything to do.
var Turn = (*Engine).turn
