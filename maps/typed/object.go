package typed

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Field is a named value of an object: a text or a number.
type Field struct {
	Name  string
	Value any
}

// Object is a key and its value flattened into one, in the order of the C
// structs. What is absent, such as an address that a pod does not have, is
// the empty text.
type Object []Field

// MarshalJSON implements json.Marshaler; the order of the fields is kept.
func (o Object) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, f := range o {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = strconv.AppendQuote(b, f.Name)
		b = append(b, ": "...)
		value, err := json.Marshal(f.Value)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", f.Name, err)
		}
		b = append(b, value...)
	}
	return append(b, '}'), nil
}

// ObjectOf makes one object of the fields of several structs, without padding.
func ObjectOf(structs ...any) (o Object) {
	for _, s := range structs {
		o = shapeOf(reflect.TypeOf(s)).append(o, reflect.ValueOf(s))
	}
	return o
}

// shape is the fields of a struct that are shown: each one's place and C name.
type shape []struct {
	index int
	name  string
}

func shapeOf(t reflect.Type) (s shape) {
	for i := range t.NumField() {
		if name := t.Field(i).Name; name != "_" {
			s = append(s, struct {
				index int
				name  string
			}{i, CName(name)})
		}
	}
	return s
}

func (s shape) append(o Object, v reflect.Value) Object {
	for _, f := range s {
		if both, ok := reflect.TypeAssert[wire.Addresses](v.Field(f.index)); ok {
			for family, a := range both {
				o = append(o, Field{wire.Family(family).String(), OrEmpty(a.String())})
			}
			continue
		}
		o = append(o, Field{f.name, plain(v.Field(f.index))})
	}
	return o
}

// plain converts a field to a text or a number.
func plain(v reflect.Value) any {
	switch x := v.Interface().(type) {
	case interface{ Host() uint16 }: // a port
		return x.Host()
	case fmt.Stringer:
		return OrEmpty(x.String())
	}
	return v.Interface()
}

// OrEmpty turns the dash that tables show for an absent value into the empty text.
func OrEmpty(text string) string {
	if text == "-" {
		return ""
	}
	return text
}

// initialisms are the words that Go writes in capitals.
var initialisms = []string{"CIDR", "MAC", "MTU", "TCP", "UDP", "VNI", "ID"}

// CName converts the Go name of a field to the name that it has in C and
// therefore in dumps: TunnelVNI is tunnel_vni.
func CName(goName string) string {
	var words []string
	for rest := goName; rest != ""; {
		n := firstWord(rest)
		words = append(words, strings.ToLower(rest[:n]))
		rest = rest[n:]
	}
	return strings.Join(words, "_")
}

func firstWord(s string) int {
	for _, w := range initialisms {
		if after, ok := strings.CutPrefix(s, w); ok && !startsLower(after) {
			return len(w)
		}
	}
	for i, c := range s {
		if i > 0 && unicode.IsUpper(c) {
			return i
		}
	}
	return len(s)
}

func startsLower(s string) bool { return s != "" && unicode.IsLower(rune(s[0])) }
