// Prints a JSON schema of each kind of value that zod has, as it and the openai package write them: one JSON object a line.
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const category = z.object({ name: z.string(), get children() { return z.array(category); } });
const kinds = {
  string: z.string(), number: z.number(), int: z.int(), int32: z.int32(), boolean: z.boolean(), null: z.null(), any: z.any(), unknown: z.unknown(), never: z.object({ a: z.never().optional() }),
  email: z.email(), "email of HTML": z.email({ pattern: z.regexes.html5Email }), url: z.url(), httpUrl: z.httpUrl(), uuid: z.uuid(), uuidv4: z.uuidv4(), guid: z.guid(), cuid: z.cuid(), cuid2: z.cuid2(), ulid: z.ulid(), nanoid: z.nanoid(),
  ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), mac: z.mac(), hostname: z.hostname(), base64: z.base64(), base64url: z.base64url(), hex: z.hex(), jwt: z.jwt(), e164: z.e164(),
  date: z.iso.date(), time: z.iso.time(), datetime: z.iso.datetime(), "datetime with offset": z.iso.datetime({ offset: true }), "local datetime": z.iso.datetime({ local: true }), duration: z.iso.duration(), hash: z.hash("sha256"),
  regex: z.string().regex(/^(?=.*\d)(?=.*[a-z])[a-z\d]{8,12}$/), "starts and ends": z.string().startsWith("a").endsWith("z").includes("m"), lowercase: z.string().lowercase(), length: z.string().min(2).max(5),
  "template": z.templateLiteral(["v", z.number(), ".", z.enum(["a", "b"])]), literal: z.literal(["a", 1, true, null]), enum: z.enum(["a", "b"]),
  gt: z.number().gt(5).lte(10), "multiple": z.int().multipleOf(5).min(0).max(100), positive: z.number().positive(),
  array: z.array(z.string()).min(1).max(3), tuple: z.tuple([z.string(), z.int()]), "tuple with rest": z.tuple([z.string()], z.boolean()), "optional in tuple": z.tuple([z.string(), z.optional(z.int())]),
  object: z.object({ a: z.string(), b: z.int().optional() }), strict: z.strictObject({ a: z.string() }), loose: z.looseObject({ a: z.string() }), catchall: z.object({ a: z.string() }).catchall(z.int()), partial: z.object({ a: z.string(), b: z.int() }).partial(),
  record: z.record(z.string(), z.int()), "record of enum": z.record(z.enum(["a", "b"]), z.int()), "partial record": z.partialRecord(z.enum(["a", "b"]), z.int()), "record of regex": z.record(z.string().regex(/^x-/), z.int()), "loose record": z.looseRecord(z.string().regex(/^x-/), z.int()),
  union: z.union([z.string(), z.int()]), xor: z.xor([z.object({ a: z.string() }), z.object({ b: z.int() })]), "discriminated union": z.discriminatedUnion("kind", [z.object({ kind: z.literal("a"), x: z.int() }), z.object({ kind: z.literal("b") })]), intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.int() })),
  nullable: z.nullable(z.int()), optional: z.object({ a: z.optional(z.int()) }), nullish: z.object({ a: z.nullish(z.int()) }), default: z.object({ a: z.int().default(3) }), catch: z.object({ a: z.int().catch(3) }), readonly: z.array(z.int()).readonly(), describe: z.string().describe("x"),
  recursive: category, stringbool: z.stringbool(), json: z.json(), exclude: z.enum(["a", "b", "c"]).exclude(["b"]), file: z.array(z.object({ a: z.string().nullable() })),
};
for (const [kind, value] of Object.entries(kinds)) {
  const reply = z.object({ value });
  const makers = {
    "zod": (s) => z.toJSONSchema(s), "zod, input": (s) => z.toJSONSchema(s, { io: "input" }), "zod, draft 7": (s) => z.toJSONSchema(s, { target: "draft-7" }), "zod, OpenAPI": (s) => z.toJSONSchema(s, { target: "openapi-3.0" }),
    "openai": (s) => zodTextFormat(s, "reply").schema,
  };
  for (const [client, make] of Object.entries(makers)) {
    try {
      console.log(JSON.stringify({ client, kind, schema: make(reply) }));
    } catch (error) {
      console.error(client, kind, error.message.split("\n")[0]);
    }
  }
}
