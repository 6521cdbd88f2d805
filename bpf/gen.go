package bpf

// The compiler is pinned, and so are its flags: the objects are committed, and
// `make verify-generate` compares them byte for byte.
//
//go:generate go tool bpf2go -go-package bpf -no-global-types -target bpfel -cc clang-19 -strip llvm-strip-19 -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Werror -Wno-unused-parameter -fno-strict-aliasing -I.. -I/usr/include/x86_64-linux-gnu" Dataplane dataplane.c
