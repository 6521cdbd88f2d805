package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// imageRelease reads from a kernel image which release it is. Linux's documentation of the x86 boot protocol says where.
func imageRelease(path string) (string, error) {
	const magicAt, pointerAt, base, longest = 0x202, 0x20e, 0x200, 256
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	head := make([]byte, pointerAt+2)
	_, err = io.ReadFull(f, head)
	pointer := binary.LittleEndian.Uint16(head[pointerAt:])
	if err != nil || string(head[magicAt:magicAt+4]) != "HdrS" || pointer == 0 {
		return "", fmt.Errorf("%s is no kernel for x86: it must be a bzImage, such as /boot/vmlinuz-VERSION", path)
	}
	text := make([]byte, longest)
	n, err := f.ReadAt(text, base+int64(pointer))
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	words := strings.Fields(string(text[:n]))
	if len(words) == 0 {
		return "", fmt.Errorf("%s does not say which release it is: it is cut off", path)
	}
	return words[0], nil
}

// modinfo returns a field of those that a module says of itself; it is empty for one that is not there.
func modinfo(module []byte, field string) (string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return "", err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return "", errors.New("it has no .modinfo")
	}
	info, err := section.Data()
	if err != nil {
		return "", err
	}
	for text := range strings.SplitSeq(string(info), "\x00") {
		if value, ok := strings.CutPrefix(text, field+"="); ok {
			return value, nil
		}
	}
	return "", nil
}

// loadModules reads what the kernel is to load, and fails for modules of another kernel.
func (k *kernel) loadModules() error {
	tree, err := openModules(k.modules)
	if err != nil {
		return err
	}
	if k.loaded, err = tree.closure(wanted); err != nil {
		return fmt.Errorf("%w below %s", err, k.modules)
	}
	for _, m := range k.loaded {
		magic, err := modinfo(m.content, "vermagic")
		if err != nil {
			return fmt.Errorf("read kernel module %s: %w", m.file, err)
		}
		if of, _, _ := strings.Cut(magic, " "); of != k.release {
			return fmt.Errorf("%s is Linux %s, but %s below %s is a module of %s: MODULES must be of this very kernel",
				k.image, k.release, m.file, k.modules, of)
		}
	}
	return nil
}
