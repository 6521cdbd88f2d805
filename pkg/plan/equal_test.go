package plan

import (
	"net/netip"
	"reflect"
	"testing"
)

// TestEqualLooksAtEveryField changes each field of what has an Equal or equal: a plan is kept for as long as they are.
func TestEqualLooksAtEveryField(t *testing.T) {
	for _, c := range []struct {
		zero any
		same func(changed any) bool
	}{
		{Facts{}, func(v any) bool { return v.(Facts).Equal(Facts{}) }},
		{Standing{}, func(v any) bool { return v.(Standing).Equal(Standing{}) }},
		{Ways{}, func(v any) bool { return v.(Ways).equal(Ways{}) }},
		{Link{}, func(v any) bool { return v.(Link).equal(Link{}) }},
		{KernelRoute{}, func(v any) bool { return v.(KernelRoute).equal(KernelRoute{}) }},
	} {
		if !c.same(c.zero) {
			t.Errorf("%T does not equal itself", c.zero)
		}
		for i := range reflect.TypeOf(c.zero).NumField() {
			changed := reflect.New(reflect.TypeOf(c.zero)).Elem()
			change(changed.Field(i))
			if name := changed.Type().Field(i).Name; c.same(changed.Interface()) {
				t.Errorf("%T: %s makes no difference", c.zero, name)
			}
		}
	}
}

// change gives a field another value than the zero one.
func change(v reflect.Value) {
	switch v.Kind() {
	case reflect.Array:
		change(v.Index(v.Len() - 1))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.Zero(v.Type().Key()), reflect.Zero(v.Type().Elem()))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("x")
	case reflect.Int:
		v.SetInt(1)
	case reflect.Uint32:
		v.SetUint(1)
	default:
		v.Set(map[reflect.Type]reflect.Value{
			reflect.TypeFor[netip.Addr]():   reflect.ValueOf(netip.IPv4Unspecified()),
			reflect.TypeFor[Ways]():         reflect.ValueOf(Ways{All: []uint32{1}}),
			reflect.TypeFor[netip.Prefix](): reflect.ValueOf(netip.PrefixFrom(netip.IPv4Unspecified(), 0)),
		}[v.Type()])
	}
}
