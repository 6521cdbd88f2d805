// Package prog runs the BPF programs on packets that its tests build, by
// BPF_PROG_TEST_RUN, and looks at everything that a run leaves behind: the
// action, the packet, the maps, and the one counter that must have moved. A test
// tells a story: what one program puts out is what the next one gets.
//
// BPF_PROG_TEST_RUN performs no redirect. That a packet arrives is proven in
// test/lab; where a property shows only on a real interface, so does a test here.
package prog
